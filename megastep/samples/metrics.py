"""Metrics of the data path; `megastep/report/meanings.py` documents each.

A metric counts trajectories; metrics under `turn/` count turns. The mean of no values is left out.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import comb

import numpy as np

from megastep.samples.filters import Dropped
from megastep.samples.trie import FoldReport
from megastep.types import Group, MicroBatch, Trajectory


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Metrics of generated groups, in training and evaluation."""
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
        **_fractions("rollout/stop_", [t.stop_reason for t in trajectories]),
    }
    return metrics | _env_metrics(trajectories) | _pass_at_k(groups) | _turn_metrics(trajectories)


def evaluation_metrics(groups: list[Group]) -> dict[str, float]:
    """The rollout metrics of held-out prompts, under `eval/`."""
    renamed = {"reward/mean": "reward_mean", "reward/std": "reward_std"}
    metrics = {}
    for name, value in rollout_metrics(groups).items():
        short = name.removeprefix("reward/").removeprefix("rollout/")
        metrics[f"eval/{renamed.get(name, short)}"] = value
    return metrics


def _env_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Means of the numbers that the environment reports."""
    reported = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.env_metrics.items():
            if isinstance(value, (bool, int, float)):
                reported[name].append(value)
    metrics: dict[str, float] = {}
    for name, values in reported.items():
        metrics |= _mean(f"env/{name}", values)
    return metrics


def _turn_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    steps = [s for t in trajectories for s in t.steps]
    recorded = any(s.routing is not None for s in steps)
    return {
        "turn/count": len(steps),
        **({"turn/older_routing": sum(map(_older_routing, trajectories))} if recorded else {}),
        **_mean_max("turn/prompt_tokens", [s.prompt_tokens for s in steps]),
        **_mean_max("turn/response_tokens", [len(s.response_ids) for s in steps]),
        **_fractions("turn/finish_", [s.finish for s in steps]),
        **_agent_metrics(trajectories, len(steps)),
    }


def _agent_metrics(trajectories: list[Trajectory], calls: int) -> dict[str, float]:
    """Calls of agent programs by role, and those that are not trained by reason."""
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        for role in trajectory.env_metrics.get("roles") or []:
            if role is not None:
                counts[f"turn/role_{role}"] += 1
        for reason, count in (trajectory.env_metrics.get("untrained") or {}).items():
            counts[f"turn/untrained_{reason}"] += count
    return {name: count / max(calls, 1) for name, count in sorted(counts.items())}


def _older_routing(trajectory: Trajectory) -> int:
    """Steps that take routing of their prompt from a step of another weight version."""
    count = 0
    for previous, step in zip(trajectory.steps, trajectory.steps[1:]):
        last_version = previous.versions[-1:, 0].tolist()
        first_version = step.versions[:1, 0].tolist()
        count += step.routing_start > 0 and last_version != first_version
    return count


def succeeded(trajectory: Trajectory) -> bool:
    return bool(trajectory.env_metrics.get("success", trajectory.reward > 0))


def sampled_tokens(trajectory: Trajectory) -> int:
    return sum(int(step.loss_mask.sum()) for step in trajectory.steps)


def count_trajectories(groups: list[Group]) -> int:
    return sum(len(group.trajectories) for group in groups)


def _pass_at_k(groups: list[Group]) -> dict[str, float]:
    """1 − C(n − c, k) / C(n, k) with c successes of n, averaged over prompts.

    Chen et al. 2021, eq. 1.
    """
    counts = [(len(g.trajectories), sum(map(succeeded, g.trajectories))) for g in groups]
    smallest = min((n for n, _ in counts), default=0)
    metrics: dict[str, float] = {}
    k = 1
    while k <= smallest:
        per_prompt = [1 - comb(n - c, k) / comb(n, k) for n, c in counts]
        metrics |= _mean(f"reward/pass_at_{k}", per_prompt)
        k *= 2
    return metrics


def filter_metrics(dropped: list[Dropped], trajectories: int) -> dict[str, float]:
    """trajectories: the number before filtering."""
    metrics: dict[str, float] = {"filter/dropped": len(dropped)}
    if trajectories:
        metrics["filter/dropped_fraction"] = len(dropped) / trajectories
    return metrics


def packing_metrics(
    report: FoldReport, micro_batches: list[list[MicroBatch]], budget_tokens: int
) -> dict[str, float]:
    """Metrics of one mini-batch, over all ranks. Padding counts only in the tokens computed."""
    all_batches = [m for rank in micro_batches for m in rank]
    real_tokens = [sum(m.real_tokens for m in rank) for rank in micro_batches]  # [rank]
    metrics: dict[str, float] = {
        "train/sequences_before_merge": report.sequences_before,
        "train/sequences_after_merge": report.sequences_after,
        "train/tokens_before_merge": report.tokens_before,
        "train/tokens_distinct": report.tokens_distinct,
        "train/tokens_computed": sum(len(m.trie) for m in all_batches),
        "train/micro_batches": len(micro_batches[0]),
        "train/padding_micro_batches": sum(m.real_tokens == 0 for m in all_batches),
        "train/packing_efficiency": sum(real_tokens) / (budget_tokens * len(all_batches)),
    }
    if report.tokens_distinct:
        metrics["train/sharing_ratio"] = report.tokens_before / report.tokens_distinct
        metrics["train/balance"] = float(np.mean(real_tokens) / max(real_tokens))
    if report.tokens_replayed:
        compared = max(report.routes_compared, 1)
        routed = report.tokens_free + report.tokens_replayed
        metrics["routing_replay/conflict_rate"] = report.routes_conflicting / compared
        metrics["routing_replay/free_fraction"] = report.tokens_free / routed
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
    """Metrics of a batch: the sum of counts, the maximum of maxima, the mean of all others."""
    combined: dict[str, float] = {}
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


def _mean(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    return {name: float(np.mean(values))} if len(values) else {}


def _mean_max(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": float(np.mean(values)), f"{name}_max": max(values)}


def _fractions(prefix: str, names: list[str]) -> dict[str, float]:
    return {f"{prefix}{name}": count / len(names) for name, count in sorted(Counter(names).items())}
