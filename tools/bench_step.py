"""Time of the parts of a training step; its speed against vLLM and Megatron alone.

    python tools/bench_step.py [CONFIG] [--steps N] [--against] [key=value ...]

Runs CONFIG for N training steps without its warm start, in a temporary run directory. Medians over
the steps but the first, which fills caches:

    rollout   engines and agents: the driver runs environments and renders prompts
    pack      advantages, trie, packing, in the driver
    update    policy ranks, with the transfer of their micro-batches
    sync      weight sync
    other     filters, metrics and logs, in the driver

`driver_share` is (pack + other) / step: driver time while neither engines nor ranks work. Bar: 5%;
a missed bar is printed. The last line is JSON.

--against also measures, for one rank and one engine on CPUs:

    generation   sampled tokens/s of the rollouts, and of `LLM.generate` with the same engine
                 settings, prompts and lengths: all first turns in one call, then all second turns
    update       computed tokens/s of the updates, and of Megatron's forward_backward_func on a
                 plain GPTModel with torch's SDPA plus its optimizer step, on sequences of the
                 trajectories' mean length, as many tokens as the updates had on average. The plain
                 model computes logits of every token, an update those of trained tokens only

with the threads that a synchronous run gives its rank and its engine. The best round counts.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep.cluster import available_cores, given_threads
from megastep.config import Config, load
from megastep.report.metrics_log import read_metrics
from megastep.samples import store
from megastep.types import Group

PARTS = ("rollout", "pack", "update", "sync")
BAR = 0.05
ROUNDS = 2  # of `--against`, after one to warm up


@dataclass
class Measured:
    """The training steps but the first and the last, which evaluates."""

    seconds: list[dict[str, float]] = field(default_factory=list)  # of each step and its parts
    rollouts: list[list[Group]] = field(default_factory=list)
    tokens_computed: list[float] = field(default_factory=list)


def measure(config: str, steps: int, overrides: list[str], keep_rollouts: bool) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        given = [
            f"run.dir={folder}",
            "run.name=bench",
            f"train.steps={steps + 1}",
            f"run.rollouts_every={int(keep_rollouts)}",
            "warm_start.trajectories=0",
            "warm_start.data=null",
            "eval.prompts=1",
            "eval.samples_per_prompt=1",
            "optimizer.warmup_steps=0",
            "checkpoint.every_steps=0",
            "checkpoint.every_minutes=0",
            *overrides,
        ]
        subprocess.run([sys.executable, "-m", "megastep", "train", config, *given], check=True)
        run = Path(folder) / "bench"
        rows = read_metrics(run)[1:-1]
        found = Measured()
        for before, row in zip(rows, rows[1:]):
            seconds = {part: row[f"time/{part}_s"] for part in PARTS}
            seconds["step"] = row["time/run_s"] - before["time/run_s"]
            seconds["other"] = seconds["step"] - sum(seconds[part] for part in PARTS)
            found.seconds.append(seconds)
            found.tokens_computed.append(row["train/tokens_computed"])
            if keep_rollouts:
                name = f"step_{int(row['step'])}.safetensors"
                found.rollouts.append(store.read(run / "rollouts" / name))
    return found


# ---------------------------------------------------------------- vLLM and Megatron alone


def against(config: Config, measured: Measured) -> dict[str, float]:
    threads = given_threads(config) or available_cores()
    sampled = [sum(lengths) for lengths in map(_sampled_lengths, measured.rollouts)]
    rollout_s = [seconds["rollout"] for seconds in measured.seconds]
    update_s = [seconds["update"] for seconds in measured.seconds]
    result = {
        "generation_tokens_per_s": sum(sampled) / sum(rollout_s),
        "llm_generate_tokens_per_s": sum(sampled)
        / _in_process(generate_seconds, threads, config, measured.rollouts),
        "update_tokens_per_s": sum(measured.tokens_computed) / sum(update_s),
    }
    tokens = round(mean(measured.tokens_computed))
    length = round(mean(_trajectory_lengths(measured.rollouts)))
    seconds = _in_process(megatron_seconds, threads, config, tokens, length)
    result["megatron_tokens_per_s"] = tokens / seconds
    result["generation_ratio"] = (
        result["generation_tokens_per_s"] / result["llm_generate_tokens_per_s"]
    )
    result["update_ratio"] = result["update_tokens_per_s"] / result["megatron_tokens_per_s"]
    return result


def _sampled_lengths(groups: list[Group]) -> list[int]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return [len(step.response_ids) for t in trajectories for step in t.steps]


def _trajectory_lengths(rollouts: list[list[Group]]) -> list[int]:
    groups = [group for rollout in rollouts for group in rollout]
    last_steps = [t.steps[-1] for group in groups for t in group.trajectories if t.steps]
    return [len(step.prompt_ids) + len(step.response_ids) for step in last_steps]


def _in_process(function, threads: int, *arguments) -> float:
    """The result of `function` in a new process, with so many threads."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(there, function, threads, *arguments)
    )
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join(30)
        process.kill()


def _serve(pipe, function, threads: int, *arguments) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    warnings.filterwarnings("ignore")
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    pipe.send(function(threads, *arguments))


def generate_seconds(threads: int, config: Config, rollouts: list[list[Group]]) -> float:
    """Seconds of `LLM.generate` for the calls of all rollouts, the best of the rounds."""
    from megastep.rollout import engine
    from megastep.rollout.generation import Sampling

    setup = engine.Setup(
        0,
        "shm",
        has_gpu=False,
        gpu_ids=None,
        own_weights=True,
        threads=threads,
        folder=".",
        log=None,
    )
    os.environ.update(engine._environment(config, setup))
    from vllm import LLM

    llm = LLM(**engine._arguments(config, setup))

    def generate(rollout: list[Group]) -> None:
        trajectories = [trajectory for group in rollout for trajectory in group.trajectories]
        for turn in range(max(len(t.steps) for t in trajectories)):
            steps = [t.steps[turn] for t in trajectories if len(t.steps) > turn]
            prompts = [{"prompt_token_ids": step.prompt_ids.tolist()} for step in steps]
            params = [
                engine._sampling_params(Sampling(len(step.response_ids), seed=seed), 0)
                for seed, step in enumerate(steps)
            ]
            llm.generate(prompts, params, use_tqdm=False)

    best = float("inf")
    for _ in range(ROUNDS + 1):
        seconds = 0.0
        for rollout in rollouts:
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            generate(rollout)
            seconds += time.perf_counter() - begin
        best = min(best, seconds)
    llm.llm_engine.engine_core.shutdown()
    return best


def megatron_seconds(threads: int, config: Config, tokens: int, length: int) -> float:
    """Seconds of a bare Megatron update on so many tokens, the best of the rounds."""
    import torch

    from megastep.distributed import parallel
    from megastep.distributed.ports import free_port
    from megastep.policy.worker import PolicyWorker
    from tools.bench_layout import bare_megatron

    torch.set_num_threads(threads)
    parallel.start(config.policy.parallel, 0, 1, f"127.0.0.1:{free_port()}")
    policy = PolicyWorker(config)
    micro_batch_tokens = min(tokens, config.budget_tokens)
    sequences = max(1, micro_batch_tokens // length)
    micro_batches = max(1, round(tokens / (sequences * length)))
    random = np.random.default_rng(0)
    ids = random.integers(policy.arch.vocab, size=(sequences, length))
    forward_backward = bare_megatron(policy, torch.from_numpy(ids))
    best = float("inf")
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        for _ in range(micro_batches):
            forward_backward()
        policy.optimizer.step()  # of a model of the same size
        best = min(best, time.perf_counter() - begin)
    parallel.stop()
    return best * tokens / (micro_batches * sequences * length)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="configs/local.yaml")
    parser.add_argument("--steps", type=int, default=8, help="training steps to measure")
    parser.add_argument(
        "--against", action="store_true", help="compare with LLM.generate and bare Megatron"
    )
    args, overrides = parser.parse_known_args()
    config = load(args.config, overrides)
    is_apart = config.policy.ranks > 1 or config.engine.num_engines > 1
    if args.against and (is_apart or config.asynchronous.max_staleness > 0):
        parser.error("--against needs one rank, one engine and async.max_staleness = 0")
    measured = measure(args.config, args.steps, overrides, args.against)
    steps = measured.seconds
    seconds = {name: median(step[name] for step in steps) for name in (*PARTS, "other", "step")}
    for name, value in seconds.items():
        print(f"{name:<10}{value:8.3f} s {value / seconds['step']:7.1%}")
    share = median((step["pack"] + step["other"]) / step["step"] for step in steps)
    print("the bar is met" if share <= BAR else f"the bar of {BAR:.0%} is missed")
    result = {"driver_share": share} | {f"{name}_s": value for name, value in seconds.items()}
    if args.against:
        speeds = against(config, measured)
        print(
            "generation  {generation_tokens_per_s:6.0f} tokens/s, LLM.generate"
            " {llm_generate_tokens_per_s:6.0f}, ratio {generation_ratio:.2f}".format(**speeds)
        )
        print(
            "update      {update_tokens_per_s:6.0f} tokens/s, bare Megatron"
            " {megatron_tokens_per_s:6.0f}, ratio {update_ratio:.2f}".format(**speeds)
        )
        result |= speeds
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
