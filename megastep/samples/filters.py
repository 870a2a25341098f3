"""Filters: which trajectories are trained on. Each returns the groups kept and what it dropped.

    failed           a trajectory whose environment or engine failed      dropped
    finite_rewards   a trajectory whose reward is NaN or infinite         dropped
    truncated        a trajectory that hit a length limit                 kept | masked | dropped
    zero_variance    a group whose trained steps all have advantage 0     dropped

`filters.dynamic_sampling` samples further prompts in place of dropped ones until a batch is full
(DAPO, Yu et al. 2025). No group is carried over to a later training step, where it would be stale.

Filters drop trajectories, never single steps: the reward belongs to the trajectory. A masked
trajectory counts in the group's statistics and trains no token.

Whether a group is degenerate depends on the estimator: equal total rewards earned at different
steps are degenerate for `grpo`, not for `step_returns` and `gigpo`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from megastep.config import Config
from megastep.samples import advantage
from megastep.types import FAILED, TRUNCATED, Group, Trajectory

TRUNCATED_POLICIES = ("keep", "mask", "drop")  # values of filters.truncated


@dataclass(frozen=True)
class Dropped:
    group: int
    trajectory: int
    reason: str


def apply(groups: list[Group], config: Config) -> tuple[list[Group], list[Dropped]]:
    """The groups to train on: without failed trajectories, through the configured filters."""
    drops_degenerate = config.filters.zero_variance or config.filters.dynamic_sampling
    if not config.loss.uses_rewards:
        drops_degenerate = False
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
    """Keep, mask or drop trajectories that hit a length limit. Masked ones are reported too."""
    if policy not in TRUNCATED_POLICIES:
        raise ValueError(
            f"filters.truncated = {policy}: must be one of {', '.join(TRUNCATED_POLICIES)}"
        )
    if policy == "keep":
        return groups, []
    kept, dropped = _drop(groups, _truncation)
    if policy == "drop":
        return kept, dropped
    masked = [
        replace(g, trajectories=[_mask(t) if _truncation(t) else t for t in g.trajectories])
        for g in groups
    ]
    return masked, [replace(d, reason=d.reason + ", masked") for d in dropped]


def zero_variance(
    groups: list[Group], estimator: str, gamma: float = 1.0, step_coef: float = 1.0
) -> tuple[list[Group], list[Dropped]]:
    """Drop the groups that are degenerate for this estimator."""
    kept: list[Group] = []
    dropped: list[Dropped] = []
    for group in groups:
        if _has_signal(group, advantage.advantages(group, estimator, gamma, step_coef)):
            kept.append(group)
        else:
            reason = _degenerate_reason(group)
            dropped += [Dropped(group.id, t.index, reason) for t in group.trajectories]
    return kept, dropped


def _has_signal(group: Group, advantages: list[np.ndarray]) -> bool:
    """Whether any trained step has an advantage other than 0."""
    for trajectory, step_advantages in zip(group.trajectories, advantages):
        for step, step_advantage in zip(trajectory.steps, step_advantages):
            if step_advantage != 0 and step.loss_mask.any():
                return True
    return False


def _degenerate_reason(group: Group) -> str:
    rewards, sizes = advantage.outcomes(group)
    if len(rewards) < 2:
        return "one trajectory, none to compare it with"
    if advantage.degenerate(rewards, sizes):
        return f"all {len(rewards)} trajectories have reward {rewards[0]:g}"
    return "no trained step has an advantage other than 0"


def _drop(
    groups: list[Group], drop_reason: Callable[[Trajectory], str | None]
) -> tuple[list[Group], list[Dropped]]:
    """Drop the trajectories with a reason, and the groups that lose all of theirs."""
    kept: list[Group] = []
    dropped: list[Dropped] = []
    for group in groups:
        left = []
        for trajectory in group.trajectories:
            reason = drop_reason(trajectory)
            if reason:
                dropped.append(Dropped(group.id, trajectory.index, reason))
            else:
                left.append(trajectory)
        if left:
            kept.append(replace(group, trajectories=left))
    return kept, dropped


def _truncation(trajectory: Trajectory) -> str | None:
    if not trajectory.steps:
        return "first prompt too long"
    last = trajectory.steps[-1]
    return f"truncated at step {last.index} ({last.finish})" if last.finish in TRUNCATED else None


def _mask(trajectory: Trajectory) -> Trajectory:
    steps = [s.replaced(loss_mask=np.zeros_like(s.loss_mask)) for s in trajectory.steps]
    return replace(trajectory, steps=steps)
