"""Logprob mismatch between the policy and the engine, with and without routing replay.

A random Qwen3-MoE (8 layers, 32 experts, top-4, hidden 128) samples 64 × 128 tokens in vLLM, once
in fp32 and once in bf16; Megatron computes the logprobs of the same tokens with the same weights.

    one turn      64 prompts of 16 tokens, 128 tokens each
    turns         16 prompts × 4 trajectories × 4 turns of 32 tokens, with 8 tokens of observation
                  between, appended to the prompt
    rewritten     the same, but each prompt drops the first 8 tokens of every earlier response

    free          Megatron's routers select the experts
    replay        routing replay: the experts that vLLM recorded

    pack layout   flat: each step is a sequence; merge: linear prefixes once; trie: every distinct
                  token once
    ranks         1, then 2 under tensor, pipeline and expert parallelism

Reported: mean and largest |Δ logprob| of the sampled tokens; KL as the mean of exp(Δ) - 1 - Δ; the
fraction of (token, layer) pairs whose set of experts differs. Bars: fp32 max |Δ| of replay ≤ 1e-5;
bf16 KL of replay ≤ 0.15 of free.

    python tools/bench_mismatch.py [--quick]

The last line is JSON, of one turn on one rank: {"fp32"|"bf16": {"free"|"replay": {"mean_abs",
"max_abs", "kl", "router_mismatch"}}}. Missed bars are printed.

    python tools/bench_mismatch.py --model DIR [--config CONFIG] [--steps N] [key=value ...]

compares on a model of your own, a mixture of experts, with a rollout of CONFIG (arithmetic.yaml) on
one rank, flat and trie. --steps also trains it in bf16 for so many steps under either layout, with
and without replay, from the same seed. The JSON then has "training": {"flat free"|...: {"success",
"held_out_first", "held_out_last", "mismatch_kl", "grad_norm_max"}}, means and maxima over steps.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # engine and ranks share the cores

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep.config import Config, ParallelConfig, load
from megastep.distributed.ports import free_port
from megastep.errors import ArchitectureError
from megastep.models.architecture import read_architecture
from megastep.report.metrics_log import read_metrics
from megastep.rollout.generation import Sampling, Session
from megastep.rollout.task import Task
from megastep.samples import lay_out
from megastep.samples.validation import recorded_tokens, validate
from megastep.types import Group, Sample, Step, Trajectory

MODEL = dict(
    hidden_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_experts=32,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    vocab_size=512,
    max_position_embeddings=512,
    initializer_range=0.1,
    tie_word_embeddings=False,
)
TRAJECTORIES = 64
TOKENS = 128  # sampled per trajectory
PROMPT_TOKENS = 16
TURNS = 4
OBSERVATION_TOKENS = 8
DROPPED_TOKENS = 8
# samples per prompt, turns, whether prompts are rewritten
WORKLOADS = {"one turn": (1, 1, False), "turns": (4, TURNS, False), "rewritten": (4, TURNS, True)}
PARALLEL = {
    "1 rank": {},
    "tensor 2": dict(tensor=2),
    "pipeline 2": dict(pipeline=2),
    "expert 2": dict(expert=2),
}
MODEL_LAYOUTS = ("flat", "trie")  # of --model
MAX_ABS_FP32 = 1e-5
KL_RATIO_BF16 = 0.15


def make_config(folder: Path, precision: str) -> Config:
    config = Config()
    config.model.path = str(folder)
    config.policy.precision = precision
    return config


def make_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **MODEL)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


# ---------------------------------------------------------------- rollouts


def generate_rollouts(config: Config) -> dict[str, list[Group]]:
    from megastep.cluster import Cluster

    with Cluster(config, with_policy=False) as cluster:
        return {
            name: asyncio.run(_groups(cluster.engines.generate, *shape))
            for name, shape in WORKLOADS.items()
        }


def task_rollout(config: Config) -> list[Group]:
    from megastep.cluster import Cluster

    task = Task.load(config)
    prompts = task.stream().take(config.rollout.prompts)
    with Cluster(config, with_policy=False) as cluster:
        return asyncio.run(task.pool(cluster.engines.generate).run(prompts))


async def _groups(generate, samples_per_prompt: int, turns: int, rewritten: bool) -> list[Group]:
    random = np.random.default_rng(0)
    vocab = MODEL["vocab_size"]
    prompts = random.integers(
        0, vocab, (TRAJECTORIES // samples_per_prompt, PROMPT_TOKENS), dtype=np.int32
    )
    observations = random.integers(
        0, vocab, (TRAJECTORIES, turns, OBSERVATION_TOKENS), dtype=np.int32
    )
    episodes = []
    for number in range(TRAJECTORIES):
        group, index = divmod(number, samples_per_prompt)
        episodes.append(
            _trajectory(generate, group, index, prompts[group], observations[number], rewritten)
        )
    trajectories = await asyncio.gather(*episodes)
    groups = []
    for group in range(len(prompts)):
        first = group * samples_per_prompt
        groups.append(Group(group, list(trajectories[first : first + samples_per_prompt])))
    validate(groups)
    return groups


async def _trajectory(
    generate, group: int, index: int, prompt, observations, rewritten: bool
) -> Trajectory:
    steps: list[Step] = []
    turns = len(observations)
    for turn, observation in enumerate(observations):
        seed = (group * 1000 + index) * 10 + turn
        known = recorded_tokens(steps, prompt, len(prompt) - 1)
        answer = await generate(
            prompt,
            Sampling(TOKENS // turns, seed=seed),
            session=Session(str(group), index),
            routing_start=known,
        )
        steps.append(
            Step(
                index=turn,
                last=turn == turns - 1,
                prompt_ids=prompt,
                response_ids=answer.ids,
                loss_mask=np.ones(len(answer.ids), bool),
                logprobs=answer.logprobs,
                versions=answer.versions,
                finish=answer.finish,
                routing=answer.routing,
                routing_start=known,
            )
        )
        kept = answer.ids[DROPPED_TOKENS:] if rewritten else answer.ids
        prompt = np.concatenate([prompt, kept, observation])
    return Trajectory(group, index, steps)


# ---------------------------------------------------------------- the policy's ranks


def serve(rank: int, pipe) -> None:
    """A rank's process: runs the jobs it receives until the pipe closes."""
    warnings.filterwarnings("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, measure(rank, **job)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def measure(
    rank: int, address: str, folder: Path, precision: str, parallelism: dict, jobs: list
) -> list:
    """For each (groups, pack layout, replay): Δ [N] of this rank's tokens, how many of its router
    decisions differ, and how many there are."""
    from megastep.distributed import parallel
    from megastep.policy.worker import PolicyWorker

    config = make_config(folder, precision)
    config.policy.parallel = ParallelConfig(**parallelism)
    config.policy.ranks = 2 if parallelism else 1
    parallel.start(config.policy.parallel, rank, config.policy.ranks, address)
    worker = PolicyWorker(config)
    results = [_measure(worker, *job) for job in jobs]
    del worker
    parallel.stop()
    return results


def _measure(
    worker, groups: list[Group], pack_layout: str, replay: bool
) -> tuple[np.ndarray, int, int]:
    from megastep.distributed import parallel

    place = parallel.place()
    tensor = worker.config.policy.parallel.tensor
    worker.config.routing_replay.enabled = replay
    samples = [
        Sample(step, g.id, t.index, 1.0, 1.0)
        for g in groups
        for t in g.trajectories
        for step in t.steps
    ]
    batches, _ = lay_out(
        samples, place.data_size, budget_tokens=4096, align_tokens=tensor, pack_layout=pack_layout
    )
    deltas = []
    differing = decisions = 0
    for batch in batches[place.data]:
        choices = _RouterChoices(worker)
        logprobs = worker.logprobs([batch])
        batch_differing, batch_decisions = choices.compare(batch.trie)
        differing += batch_differing
        decisions += batch_decisions
        if logprobs and place.tensor == 0:
            real = batch.trie.loss.group >= 0
            deltas.append((logprobs[0] - batch.trie.loss.rollout_logprob)[real])
    return np.concatenate(deltas or [np.zeros(0, np.float32)]), differing, decisions


class _RouterChoices:
    """The experts that this rank's routers select in the next forward pass."""

    def __init__(self, worker):
        from megatron.core.transformer.moe.router import TopKRouter

        self.maps: dict[int, np.ndarray] = {}  # layer → [tokens, experts] bool
        self.hooks = []
        for chunk in worker.chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    self.hooks.append(module.register_forward_hook(self._record))

    def _record(self, router, inputs, output) -> None:
        self.maps[router.layer_number - 1] = output[1].cpu().numpy()

    def compare(self, trie) -> tuple[int, int]:
        """How many decisions differ from the recorded routing, of how many."""
        from megastep.distributed import parallel

        for hook in self.hooks:
            hook.remove()
        routing = parallel.sequence_shard(trie.routing())  # [T/tp, layers, K], -1: not recorded
        differing = decisions = 0
        for layer, chosen in self.maps.items():
            recorded = routing[:, layer, 0] >= 0
            experts = routing[recorded, layer].astype(np.int64)
            same = np.take_along_axis(chosen[recorded], experts, 1).all(1)
            differing += int((~same).sum())
            decisions += len(same)
        return differing, decisions


class Ranks:
    """Two processes for all parallel layouts; the second idles where one suffices."""

    def __enter__(self):
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        self.pipes = []
        self.processes = []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        return self

    def measure(self, **job) -> list[dict[str, float]]:
        address = f"127.0.0.1:{free_port()}"
        pipes = self.pipes if job["parallelism"] else self.pipes[:1]
        for pipe in pipes:
            pipe.send(dict(job, address=address))
        answers = []
        for pipe in pipes:
            ok, answer = pipe.recv()
            if not ok:
                raise RuntimeError(answer)
            answers.append(answer)
        tokens = [_sampled_tokens(groups) for groups, _, _ in job["jobs"]]
        return [_statistics(parts, expected) for *parts, expected in zip(*answers, tokens)]

    def __exit__(self, *_):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def _sampled_tokens(groups: list[Group]) -> int:
    steps = [step for group in groups for t in group.trajectories for step in t.steps]
    return sum(int(step.loss_mask.sum()) for step in steps)


def _statistics(parts: list, expected: int) -> dict[str, float]:
    """Over the results of all ranks, which have `expected` tokens."""
    deltas, differing, decisions = zip(*parts)
    delta = np.concatenate(deltas).astype(np.float64)
    assert len(delta) == expected, f"{len(delta)} tokens instead of {expected}"
    return {
        "mean_abs": float(np.abs(delta).mean()),
        "max_abs": float(np.abs(delta).max()),
        "kl": float((np.exp(delta) - 1 - delta).mean()),
        "router_mismatch": sum(differing) / sum(decisions),
    }


# ---------------------------------------------------------------- report


def cases(quick: bool) -> list[tuple[str, str, str]]:
    """(ranks, workload, pack layout)"""
    found = [("1 rank", "one turn", "flat")]
    if quick:
        return found
    found += [("1 rank", "turns", pack_layout) for pack_layout in ("flat", "merge", "trie")]
    found += [("1 rank", "rewritten", pack_layout) for pack_layout in ("flat", "trie")]
    for ranks in list(PARALLEL)[1:]:
        found += [(ranks, "one turn", "trie"), (ranks, "rewritten", "trie")]
    return found


def compare(ranks: Ranks, folder: Path, precision: str, quick: bool) -> tuple[dict, list[str]]:
    """The JSON's entry for a precision, and the missed bars."""
    rollouts = generate_rollouts(make_config(folder, precision))
    main: dict = {}
    missed = []
    for name, parallelism in PARALLEL.items():
        selected = [case for case in cases(quick) if case[0] == name]
        if not selected:
            continue
        jobs = []
        for _, workload, pack_layout in selected:
            for replay in (False, True):
                jobs.append((rollouts[workload], pack_layout, replay))
        found = ranks.measure(
            folder=folder, precision=precision, parallelism=parallelism, jobs=jobs
        )
        for (_, workload, pack_layout), free, replayed in zip(selected, found[::2], found[1::2]):
            main = main or {"free": free, "replay": replayed}
            missed += _report(precision, name, workload, pack_layout, free, replayed)
    return main, missed


def compare_model(ranks: Ranks, args: argparse.Namespace, precision: str) -> tuple[dict, list[str]]:
    """As `compare`, for the model and the task that were given."""
    config = load(
        args.config, [*args.overrides, f"model.path={args.model}", f"policy.precision={precision}"]
    )
    groups = task_rollout(config)
    jobs = [(groups, layout, replay) for layout in MODEL_LAYOUTS for replay in (False, True)]
    found = ranks.measure(folder=args.model, precision=precision, parallelism={}, jobs=jobs)
    results = {}
    missed = []
    for layout, free, replayed in zip(MODEL_LAYOUTS, found[::2], found[1::2]):
        results[layout] = {"free": free, "replay": replayed}
        missed += _report(precision, "1 rank", args.config.stem, layout, free, replayed)
    return results, missed


def _report(
    precision: str, ranks: str, workload: str, pack_layout: str, free: dict, replayed: dict
) -> list[str]:
    """Print both rows; returns the missed bars."""
    labels = f"{precision:<6}{ranks:<12}{workload:<11}{pack_layout:<7}"
    _print_row(labels, "free", free)
    _print_row(labels, "replay", replayed)
    bar = _missed(precision, free, replayed)
    return [f"{precision}, {ranks}, {workload}, {pack_layout}: {bar}"] if bar else []


def training_runs(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Training in bf16 with and without replay under the layouts, from the same seed."""
    results = {}
    for layout in MODEL_LAYOUTS:
        for replay in (False, True):
            name = f"{layout} {'replay' if replay else 'free'}"
            results[name] = _training_run(args, layout, replay)
            figures = ", ".join(f"{key} {value:.3g}" for key, value in results[name].items())
            print(f"training, {name}: {figures}", flush=True)
    return results


def _training_run(args: argparse.Namespace, layout: str, replay: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        given = [
            *args.overrides,
            f"model.path={args.model}",
            "policy.precision=bf16",
            f"train.pack_layout={layout}",
            f"routing_replay.enabled={str(replay).lower()}",
            f"train.steps={args.steps}",
            f"run.dir={folder}",
            "run.name=bench",
            "checkpoint.every_steps=0",
            "checkpoint.every_minutes=0",
        ]
        command = [sys.executable, "-m", "megastep", "train", str(args.config), *given]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = read_metrics(Path(folder) / "bench")
    steps = rows[1:]
    held_out = [row["eval/success"] for row in rows if "eval/success" in row]
    return {
        "success": mean(row["reward/success"] for row in steps),
        "held_out_first": held_out[0],
        "held_out_last": held_out[-1],
        "mismatch_kl": mean(row["mismatch/kl"] for row in steps),
        "grad_norm_max": max(row.get("train/grad_norm", float("inf")) for row in steps),
    }


def _print_row(labels: str, routing: str, found: dict[str, float]) -> None:
    print(
        f"{labels}{routing:<8}{found['mean_abs']:>10.1e}{found['max_abs']:>10.1e}"
        f"{found['kl']:>10.1e}{found['router_mismatch']:>10.2%}",
        flush=True,
    )


def _missed(precision: str, free: dict, replay: dict) -> str | None:
    if precision == "fp32" and replay["max_abs"] > MAX_ABS_FP32:
        return f"max |Δ| of replay {replay['max_abs']:.1e} > {MAX_ABS_FP32}"
    if precision == "bf16" and replay["kl"] > KL_RATIO_BF16 * free["kl"]:
        return f"KL of replay {replay['kl'] / free['kl']:.2f} of free > {KL_RATIO_BF16}"
    return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one turn on one rank only")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face folder of a mixture of experts"
    )
    parser.add_argument("--config", type=Path, default=Path("configs/arithmetic.yaml"))
    parser.add_argument("--steps", type=int, default=0, help="training steps of each run (0)")
    args, args.overrides = parser.parse_known_args()
    unknown = [word for word in args.overrides if "=" not in word]
    if unknown:
        parser.error(f"{unknown[0]}: unknown; settings have the form key=value")
    if args.model is None and (args.steps or args.overrides):
        parser.error("--steps and key=value need --model")
    if args.model is not None:
        _check_model(parser, args.model)
    if any(setting.startswith("rollout.temperature=") for setting in args.overrides):
        parser.error("rollout.temperature: the comparison is at temperature 1")
    return args


def _check_model(parser: argparse.ArgumentParser, folder: Path) -> None:
    try:
        has_experts = read_architecture(folder).experts is not None
    except ArchitectureError as error:
        parser.error(f"--model: {error}")
    if not has_experts:
        parser.error(f"--model {folder}: has no experts")


def main() -> int:
    args = parse()
    print(
        f"{'':<6}{'ranks':<12}{'workload':<11}{'pack':<7}{'routing':<8}{'mean |Δ|':>10}"
        f"{'max |Δ|':>10}{'KL':>10}{'routers ≠':>10}"
    )
    results: dict = {}
    missed = []
    with tempfile.TemporaryDirectory() as folder, Ranks() as ranks:
        if args.model is None:
            make_model(Path(folder))
        for precision in ("fp32", "bf16"):
            if args.model is None:
                found = compare(ranks, Path(folder), precision, args.quick)
            else:
                found = compare_model(ranks, args, precision)
            results[precision], bars = found
            missed += bars
    print("\n".join(f"missed: {line}" for line in missed) or "every bar is met")
    if args.steps:
        results["training"] = training_runs(args)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
