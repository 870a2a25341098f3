"""How far are the policy's logprobs from the engine's, with and without the rollout's experts replayed?

A random Qwen3-MoE (8 layers, 32 experts, top-4, hidden 128) samples 64 × 128 tokens in vLLM, once in fp32 and once in
bf16; Megatron computes the same tokens' logprobs with the same weights.

    one turn    64 prompts of 16 tokens, 128 tokens each
    turns       16 prompts × 4 trajectories × 4 turns of 32 tokens, 8 tokens of observation between; appended
    rewritten   the same, but each turn's prompt leaves out the first 8 tokens of every response before it

    free        Megatron's routers choose the experts
    replay      each token goes to the experts that vLLM sent it to

    layout      flat: each step on its own; merge: linear prefixes once; trie: every distinct token once
    ranks       1, then 2 under tensor, pipeline and expert parallelism

Numbers: mean and largest |Δ logprob| of the sampled tokens; KL as the mean of exp(Δ) - 1 - Δ; the share of (token,
layer) pairs whose set of experts differs. Bars: fp32 replay max |Δ| ≤ 1e-5; bf16 KL of replay ≤ 0.15 of free.

    python tools/bench_mismatch.py [--quick]

The last line is JSON: {"fp32"|"bf16": {"free"|"replay": {"mean_abs", "max_abs", "kl", "router_mismatch"}}}, of one turn
on one rank. A missed bar is printed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # engine and ranks share the cores

import argparse
import asyncio
import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep.config import Config, ParallelConfig
from megastep.distributed.ports import free_port
from megastep.rollout.generation import Sampling
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
TRAJECTORIES, TOKENS, PROMPT, TURNS, OBSERVATION, DROPPED = 64, 128, 16, 4, 8, 8
WORKLOADS = {"one turn": (1, 1, False), "turns": (4, TURNS, False), "rewritten": (4, TURNS, True)}
PARALLEL = {
    "1 rank": {},
    "tensor 2": dict(tensor=2),
    "pipeline 2": dict(pipeline=2),
    "expert 2": dict(expert=2),
}
MAX_FP32, KL_RATIO_BF16 = 1e-5, 0.15


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


def roll_out(config: Config) -> dict[str, list[Group]]:
    from megastep.cluster import Cluster

    with Cluster(config, with_policy=False) as cluster:
        return {
            name: asyncio.run(_groups(cluster.engines.generate, *shape))
            for name, shape in WORKLOADS.items()
        }


async def _groups(generate, samples: int, turns: int, rewritten: bool) -> list[Group]:
    random = np.random.default_rng(0)
    ids = range(TRAJECTORIES // samples)
    prompts = random.integers(0, MODEL["vocab_size"], (len(ids), PROMPT), dtype=np.int32)
    told = random.integers(
        0, MODEL["vocab_size"], (TRAJECTORIES, turns, OBSERVATION), dtype=np.int32
    )
    trajectories = await asyncio.gather(
        *(
            _trajectory(
                generate, group, index, prompts[group], told[group * samples + index], rewritten
            )
            for group in ids
            for index in range(samples)
        )
    )
    groups = [
        Group(group, list(trajectories[group * samples : (group + 1) * samples])) for group in ids
    ]
    validate(groups)
    return groups


async def _trajectory(
    generate, group: int, index: int, prompt, told, rewritten: bool
) -> Trajectory:
    steps: list[Step] = []
    for turn, observation in enumerate(told):
        seed = (group * 1000 + index) * 10 + turn
        known = recorded_tokens(steps, prompt, len(prompt) - 1)
        answer = await generate(
            prompt,
            Sampling(TOKENS // len(told), seed=seed),
            session=f"{group}/{index}",
            routing_start=known,
        )
        steps.append(
            Step(
                index=turn,
                last=turn == len(told) - 1,
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
        prompt = np.concatenate([prompt, answer.ids[DROPPED if rewritten else 0 :], observation])
    return Trajectory(group, index, steps)


# ---------------------------------------------------------------- the policy's ranks


def serve(rank: int, pipe) -> None:
    """A rank's process: measures what it is sent until the pipe closes."""
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
    """For each (groups, layout, replay): (Δ [N], differing router decisions, all of them), of this rank's part."""
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


def _measure(worker, groups: list[Group], layout: str, replay: bool) -> tuple[np.ndarray, int, int]:
    from megastep.distributed import parallel

    place, p = parallel.place(), worker.config.policy.parallel
    worker.config.routing_replay.enabled = replay
    samples = [
        Sample(step, g.id, t.index, 1.0, 1.0)
        for g in groups
        for t in g.trajectories
        for step in t.steps
    ]
    batches, _ = lay_out(
        samples, place.data_size, budget_tokens=4096, align_tokens=p.tensor, pack_layout=layout
    )
    deltas, differing, decisions = [], 0, 0
    for batch in batches[place.data]:
        choices = _RouterChoices(worker)
        logprobs = worker.logprobs([batch])
        wrong, all_of_them = choices.compare(batch.trie, place)
        differing, decisions = differing + wrong, decisions + all_of_them
        if logprobs and place.tensor == 0:
            real = batch.trie.loss.group >= 0
            deltas.append((logprobs[0] - batch.trie.loss.rollout_logprob)[real])
    return np.concatenate(deltas or [np.zeros(0, np.float32)]), differing, decisions


class _RouterChoices:
    """What this rank's routers choose in the next forward pass."""

    def __init__(self, worker):
        from megatron.core.transformer.moe.router import TopKRouter

        self.maps: dict[int, np.ndarray] = {}  # layer → [tokens, experts] bool
        self.hooks = []
        for chunk in worker.chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    self.hooks.append(module.register_forward_hook(self._remember))

    def _remember(self, router, inputs, output) -> None:
        self.maps[router.layer_number - 1] = output[1].cpu().numpy()

    def compare(self, trie, place) -> tuple[int, int]:
        for hook in self.hooks:
            hook.remove()
        routing = trie.routing()  # [T, layers, K], -1: not recorded
        stretch = len(routing) // place.tensor_size
        mine = routing[place.tensor * stretch : (place.tensor + 1) * stretch]
        differing = decisions = 0
        for layer, chosen in self.maps.items():
            recorded = mine[:, layer, 0] >= 0
            wanted = mine[recorded, layer].astype(np.int64)
            same = np.take_along_axis(chosen[recorded], wanted, 1).all(1)
            differing, decisions = differing + int((~same).sum()), decisions + len(same)
        return differing, decisions


class Ranks:
    """Two processes for every layout; the second waits where one is enough."""

    def __enter__(self):
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
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
        return [_numbers(parts) for parts in zip(*answers)]

    def __exit__(self, *_):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def _numbers(parts: tuple) -> dict[str, float]:
    delta = np.concatenate([part[0] for part in parts]).astype(np.float64)
    assert len(delta) == TRAJECTORIES * TOKENS, (
        f"{len(delta)} tokens instead of {TRAJECTORIES * TOKENS}"
    )
    return {
        "mean_abs": float(np.abs(delta).mean()),
        "max_abs": float(np.abs(delta).max()),
        "kl": float((np.exp(delta) - 1 - delta).mean()),
        "router_mismatch": sum(part[1] for part in parts) / sum(part[2] for part in parts),
    }


# ---------------------------------------------------------------- report


def cases(quick: bool) -> list[tuple[str, str, str]]:
    """(ranks, workload, layout)"""
    found = [("1 rank", "one turn", "flat")]
    if not quick:
        found += [("1 rank", "turns", layout) for layout in ("flat", "merge", "trie")]
        found += [("1 rank", "rewritten", layout) for layout in ("flat", "trie")]
        found += [
            (ranks, workload, "trie")
            for ranks in list(PARALLEL)[1:]
            for workload in ("one turn", "rewritten")
        ]
    return found


def compare(ranks: Ranks, folder: Path, precision: str, quick: bool) -> tuple[dict, list[str]]:
    """The JSON's entry for a precision, and the bars that were missed."""
    rollouts = roll_out(make_config(folder, precision))
    main, missed = None, []
    for name, layout in PARALLEL.items():
        mine = [case for case in cases(quick) if case[0] == name]
        jobs = [
            (rollouts[workload], tree, replay)
            for _, workload, tree in mine
            for replay in (False, True)
        ]
        if not jobs:
            continue
        found = ranks.measure(folder=folder, precision=precision, parallelism=layout, jobs=jobs)
        for (_, workload, tree), free, replay in zip(mine, found[::2], found[1::2]):
            main = main or {"free": free, "replay": replay}
            bad = _missed(precision, free, replay)
            missed += [f"{precision}, {name}, {workload}, {tree}: {bad}"] if bad else []
            for kind, numbers in (("free", free), ("replay", replay)):
                print(
                    f"{precision:<6}{name:<12}{workload:<11}{tree:<7}{kind:<8}{numbers['mean_abs']:>10.1e}"
                    f"{numbers['max_abs']:>10.1e}{numbers['kl']:>10.1e}{numbers['router_mismatch']:>10.2%}",
                    flush=True,
                )
    return main, missed


def _missed(precision: str, free: dict, replay: dict) -> str | None:
    if precision == "fp32" and replay["max_abs"] > MAX_FP32:
        return f"max |Δ| of replay {replay['max_abs']:.1e} > {MAX_FP32}"
    if precision == "bf16" and replay["kl"] > KL_RATIO_BF16 * free["kl"]:
        return f"KL of replay {replay['kl'] / free['kl']:.2f} of free > {KL_RATIO_BF16}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one turn on one rank only")
    args = parser.parse_args()
    print(
        f"{'':<6}{'ranks':<12}{'workload':<11}{'layout':<7}{'experts':<8}{'mean |Δ|':>10}{'max |Δ|':>10}{'KL':>10}"
        f"{'routers ≠':>10}"
    )
    results, missed = {}, []
    with tempfile.TemporaryDirectory() as folder, Ranks() as ranks:
        make_model(Path(folder))
        for precision in ("fp32", "bf16"):
            results[precision], bad = compare(ranks, Path(folder), precision, args.quick)
            missed += bad
    print("\n".join(f"missed: {line}" for line in missed) or "every bar is met")
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
