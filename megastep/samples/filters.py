"""Filters: which trajectories are trained on. Each returns what is left and what it dropped, with the reason.

    failed           a trajectory whose environment or engine failed    dropped: its reward does not judge the policy
    finite_rewards   a trajectory whose reward is NaN or infinite       dropped
    truncated        a trajectory that was cut off                      kept | masked | dropped
    zero_variance    a prompt whose trained steps all have advantage 0  dropped: the estimator learns nothing from it

`filters.dynamic_sampling` plays others in the place of prompts that were dropped, until a batch is full (DAPO, Yu et
al. 2025); nothing is left over for a later step, by when it would be of an older policy.

They drop trajectories, never steps: one trajectory has one reward however many rows it becomes. A masked trajectory
keeps its place in the group's statistics and trains nothing.

Whether a prompt is degenerate depends on the estimator: trajectories of equal total reward, earned at different steps,
mean nothing to `grpo` and something to `step_returns` and `gigpo`.
"""

from dataclasses import asdict, dataclass, replace

import numpy as np

from megastep.config import Config
from megastep.samples import advantage
from megastep.types import FAILED, TRUNCATED, Group, Trajectory

TRUNCATED_POLICIES = ("keep", "mask", "drop")  # of filters.truncated


@dataclass(frozen=True)
class Dropped:
    group: int
    trajectory: int
    reason: str


def apply(groups: list[Group], config: Config) -> tuple[list[Group], list[Dropped]]:
    """The groups to train on: without failed trajectories, through the configured filters."""
    drops_degenerate = config.filters.zero_variance or config.filters.dynamic_sampling
    if config.loss.type == "nll":
        drops_degenerate = False  # supervised training has no advantages
    groups, dropped = failed(groups)
    groups, not_finite = finite_rewards(groups)
    groups, cut_off = truncated(groups, config.filters.truncated)
    degenerate: list[Dropped] = []
    if drops_degenerate:
        groups, degenerate = zero_variance(groups, **asdict(config.advantage))
    # A masked trajectory may be dropped later: it counts once, with its first reason.
    first_reasons: dict[tuple[int, int], Dropped] = {}
    for drop in [*dropped, *not_finite, *cut_off, *degenerate]:
        first_reasons.setdefault((drop.group, drop.trajectory), drop)
    return groups, list(first_reasons.values())


def failed(groups: list[Group]) -> tuple[list[Group], list[Dropped]]:
    def reason(trajectory: Trajectory) -> str | None:
        if trajectory.stop_reason not in FAILED:
            return None
        error = trajectory.env_metrics.get("error")
        return trajectory.stop_reason + (f": {error}" if error else "")

    return _drop(groups, reason)


def finite_rewards(groups: list[Group]) -> tuple[list[Group], list[Dropped]]:
    def reason(trajectory: Trajectory) -> str | None:
        return None if np.isfinite(trajectory.reward) else f"reward is {trajectory.reward}"

    return _drop(groups, reason)


def truncated(groups: list[Group], policy: str) -> tuple[list[Group], list[Dropped]]:
    """What to do with trajectories that hit a length limit. Masked ones are reported too: they train nothing."""
    if policy not in TRUNCATED_POLICIES:
        raise ValueError(
            f"filters.truncated = {policy}: must be one of {', '.join(TRUNCATED_POLICIES)}"
        )
    if policy == "keep":
        return groups, []
    kept, dropped = _drop(groups, _cut_off)
    if policy == "drop":
        return kept, dropped
    masked = [
        replace(g, trajectories=[_mask(t) if _cut_off(t) else t for t in g.trajectories])
        for g in groups
    ]
    return masked, [replace(d, reason=d.reason + ", masked") for d in dropped]


def zero_variance(
    groups: list[Group], estimator: str, gamma: float = 1.0, step_coef: float = 1.0
) -> tuple[list[Group], list[Dropped]]:
    """Without the groups from which this estimator learns nothing."""
    kept, dropped = [], []
    for group in groups:
        if _teaches(group, advantage.advantages(group, estimator, gamma, step_coef)):
            kept.append(group)
        else:
            reason = _why_degenerate(group)
            dropped += [Dropped(group.id, t.index, reason) for t in group.trajectories]
    return kept, dropped


def _teaches(group: Group, advantages: list[np.ndarray]) -> bool:
    """Is any step trained with an advantage other than 0?"""
    return any(
        advantage != 0 and step.loss_mask.any()
        for trajectory, per_step in zip(group.trajectories, advantages)
        for step, advantage in zip(trajectory.steps, per_step)
    )


def _why_degenerate(group: Group) -> str:
    rewards, sizes = advantage.outcomes(group)
    if len(rewards) < 2:
        return "one trajectory, none to compare it with"
    if advantage.degenerate(rewards, sizes):
        return f"all {len(rewards)} trajectories have reward {rewards[0]:g}"
    return "no trained step has an advantage other than 0"


def _drop(groups: list[Group], reason) -> tuple[list[Group], list[Dropped]]:
    """Without the trajectories that `reason` gives one for; groups that lose all of them go too."""
    kept, dropped = [], []
    for group in groups:
        reasons = [reason(t) for t in group.trajectories]
        dropped += [
            Dropped(group.id, t.index, why) for t, why in zip(group.trajectories, reasons) if why
        ]
        left = [t for t, why in zip(group.trajectories, reasons) if not why]
        if left:
            kept.append(replace(group, trajectories=left))
    return kept, dropped


def _cut_off(trajectory: Trajectory) -> str | None:
    if not trajectory.steps:
        return "first prompt too long"
    last = trajectory.steps[-1]
    return f"cut off at step {last.index} ({last.finish})" if last.finish in TRUNCATED else None


def _mask(trajectory: Trajectory) -> Trajectory:
    return replace(
        trajectory,
        steps=[replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in trajectory.steps],
    )
