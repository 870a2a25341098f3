"""Metrics of the data path. What each means is said in `megastep/report/meanings.py`.

A number about trajectories counts each once; one about turns says `turn/`. Means over nothing are left out rather than
given as NaN.
"""

from collections import Counter, defaultdict
from math import comb

import numpy as np

from megastep.samples.filters import Dropped
from megastep.samples.trie import FoldReport
from megastep.types import Group, MicroBatch, Trajectory


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Of what was generated; the same function for training and evaluation, synchronous and not."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = np.array([t.reward for t in trajectories])
    turns = [len(t.steps) for t in trajectories]
    lengths = [sum(len(s.response_ids) for s in t.steps) for t in trajectories]
    metrics = {
        "rollout/prompts": len(groups),
        "rollout/trajectories": len(trajectories),
        "rollout/no_steps": turns.count(0),
        **_mean("reward/mean", rewards),
        **({"reward/std": float(rewards.std())} if len(rewards) else {}),
        **_mean("reward/success", [succeeded(t) for t in trajectories]),
        **_mean_max("rollout/turns", turns),
        **_mean_max("rollout/response_tokens", lengths),
        **_shares("rollout/stop_", [t.stop_reason for t in trajectories]),
    }
    reported = defaultdict(list)
    for t in trajectories:
        for name, value in t.env_metrics.items():
            if isinstance(value, (bool, int, float)):
                reported[name].append(value)
    for name, values in reported.items():
        metrics |= _mean(f"env/{name}", values)
    return metrics | _pass_at_k(groups) | _turn_metrics(trajectories)


def evaluation_metrics(groups: list[Group]) -> dict[str, float]:
    """The same of held-out prompts, under names of their own."""
    short = {"reward/mean": "reward_mean", "reward/std": "reward_std"}
    return {
        "eval/" + short.get(name, name.removeprefix("reward/").removeprefix("rollout/")): value
        for name, value in rollout_metrics(groups).items()
    }


def _turn_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    steps = [s for t in trajectories for s in t.steps]
    recorded = any(s.routing is not None for s in steps)
    return {
        "turn/count": len(steps),
        **({"turn/older_routing": sum(map(_older_routing, trajectories))} if recorded else {}),
        **_mean_max("turn/prompt_tokens", [len(s.prompt_ids) for s in steps]),
        **_mean_max("turn/response_tokens", [len(s.response_ids) for s in steps]),
        **_shares("turn/finish_", [s.finish for s in steps]),
    }


def _older_routing(trajectory: Trajectory) -> int:
    """Steps that left out experts of their prompt, and were sampled by another version than the step that has them."""
    pairs = zip(trajectory.steps, trajectory.steps[1:])
    return sum(
        s.routing_start > 0 and before.versions[-1:, 0].tolist() != s.versions[:1, 0].tolist()
        for before, s in pairs
    )


def succeeded(trajectory: Trajectory) -> bool:
    return bool(trajectory.env_metrics.get("success", trajectory.reward > 0))


def sampled_tokens(trajectory: Trajectory) -> int:
    return sum(int(step.loss_mask.sum()) for step in trajectory.steps)


def count_trajectories(groups: list[Group]) -> int:
    return sum(len(group.trajectories) for group in groups)


def _pass_at_k(groups: list[Group]) -> dict[str, float]:
    """1 − C(n − c, k) / C(n, k) with c successes of n, averaged over prompts (Chen et al. 2021, eq. 1)."""
    counts = [(len(g.trajectories), sum(map(succeeded, g.trajectories))) for g in groups]
    smallest = min((n for n, _ in counts), default=0)
    metrics, k = {}, 1
    while k <= smallest:
        metrics |= _mean(
            f"reward/pass_at_{k}", [1 - comb(n - c, k) / comb(n, k) for n, c in counts]
        )
        k *= 2
    return metrics


def filter_metrics(dropped: list[Dropped], trajectories: int) -> dict[str, float]:
    """`trajectories`: how many went in."""
    share = {"filter/dropped_fraction": len(dropped) / trajectories} if trajectories else {}
    return {"filter/dropped": len(dropped)} | share


def layout_metrics(
    report: FoldReport, micro_batches: list[list[MicroBatch]], budget_tokens: int
) -> dict[str, float]:
    """Of one mini-batch, over all ranks. Fillers count as what they cost and as nothing else."""
    all_batches = [m for rank in micro_batches for m in rank]
    real = [sum(m.real_tokens for m in rank) for rank in micro_batches]
    metrics = {
        "train/sequences_before_merge": report.sequences_before,
        "train/sequences_after_merge": report.sequences_after,
        "train/tokens_before_merge": report.tokens_before,
        "train/tokens_distinct": report.tokens_distinct,
        "train/tokens_computed": sum(len(m.trie) for m in all_batches),
        "train/micro_batches": len(micro_batches[0]),
        "train/padding_micro_batches": sum(m.real_tokens == 0 for m in all_batches),
        "train/packing_efficiency": sum(real) / (budget_tokens * len(all_batches)),
    }
    if report.tokens_distinct:
        metrics["train/sharing_ratio"] = report.tokens_before / report.tokens_distinct
        metrics["train/balance"] = float(np.mean(real) / max(real))
    if report.tokens_replayed:
        metrics["routing_replay/conflict_rate"] = report.routes_conflicting / max(
            report.routes_compared, 1
        )
        metrics["routing_replay/free_fraction"] = report.tokens_free / (
            report.tokens_free + report.tokens_replayed
        )
    return metrics


_COUNTS = (
    "train/sequences_before_merge",
    "train/sequences_after_merge",
    "train/tokens_before_merge",
    "train/tokens_distinct",
    "train/tokens_computed",
    "train/tokens_trained",
    "train/micro_batches",
    "train/padding_micro_batches",
    "train/empty_mini_batches",
)


def over_mini_batches(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Of a batch, from those of its mini-batches: counts are added, maxima are maxima, all else is the mean."""
    combined = {}
    for name in dict.fromkeys(name for each in metrics for name in each):
        values = [each[name] for each in metrics if name in each]
        if name in _COUNTS:
            combined[name] = sum(values)
        elif name.endswith(("_max", "/max_abs")):
            combined[name] = max(values)
        else:
            combined[name] = float(np.mean(values))
    return combined


# ---------------------------------------------------------------- small statistics


def _mean(name: str, values) -> dict[str, float]:
    return {name: float(np.mean(values))} if len(values) else {}


def _mean_max(name: str, values) -> dict[str, float]:
    return (
        {f"{name}_mean": float(np.mean(values)), f"{name}_max": max(values)} if len(values) else {}
    )


def _shares(prefix: str, names: list[str]) -> dict[str, float]:
    return {f"{prefix}{name}": count / len(names) for name, count in sorted(Counter(names).items())}
