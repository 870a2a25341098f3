"""Filters: which trajectories are trained on. Each returns what is left and what it dropped, with the reason.

    failed           a trajectory whose environment or engine failed    dropped: its reward does not judge the policy
    finite_rewards   a trajectory whose reward is NaN or infinite       dropped
    over_long        a trajectory that was cut off                      kept | masked | dropped
    untrained        a prompt of which no token is trained              dropped where another is played in its place
    zero_variance    a prompt whose trajectories all earned the same    dropped: no estimator learns from it

`filters.dynamic_sampling` plays others in the place of prompts that were dropped, until a batch is full (DAPO, Yu et
al. 2025); nothing is left over for a later step, by when it would be of an older policy.

They look at trajectories, never at steps: one trajectory has one reward however many rows it becomes. A masked
trajectory keeps its place in the group's statistics and trains nothing.
"""

from dataclasses import dataclass, replace

import numpy as np

from megastep.types import Group, Trajectory

OVER_LONG = ("keep", "mask", "drop")
CUT_OFF = ("length", "context")  # finish of a step that ran out of room
FAILED = ("env_error", "env_timeout", "engine_error", "abort")  # stop_reason of a trajectory that proves nothing


@dataclass(frozen=True)
class Dropped:
    group: int
    trajectory: int
    reason: str


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


def over_long(groups: list[Group], policy: str) -> tuple[list[Group], list[Dropped]]:
    """What to do with trajectories that hit a length limit. Masked ones are reported too: they train nothing."""
    if policy not in OVER_LONG:
        raise ValueError(f"filters.over_long = {policy}: must be one of {', '.join(OVER_LONG)}")
    if policy == "keep":
        return groups, []
    kept, dropped = _drop(groups, _cut_off)
    if policy == "drop":
        return kept, dropped
    masked = [replace(g, trajectories=[_mask(t) if _cut_off(t) else t for t in g.trajectories]) for g in groups]
    return masked, [replace(d, reason=d.reason + ", masked") for d in dropped]


def untrained(groups: list[Group]) -> tuple[list[Group], list[Dropped]]:
    """A prompt whose trajectories are all masked trains nothing, and cannot count as one of a full batch."""
    kept, dropped = [], []
    for group in groups:
        if any(step.loss_mask.any() for t in group.trajectories for step in t.steps):
            kept.append(group)
        else:
            dropped += [Dropped(group.id, t.index, "no token of the prompt is trained") for t in group.trajectories]
    return kept, dropped


def zero_variance(groups: list[Group]) -> tuple[list[Group], list[Dropped]]:
    kept, dropped = [], []
    for group in groups:
        rewards = {t.reward for t in group.trajectories}
        if len(rewards) > 1:
            kept.append(group)
        else:
            reason = f"all {len(group.trajectories)} trajectories have reward {rewards.pop():g}" if rewards else ""
            dropped += [Dropped(group.id, t.index, reason) for t in group.trajectories]
    return kept, dropped


def _drop(groups: list[Group], reason) -> tuple[list[Group], list[Dropped]]:
    """Without the trajectories that `reason` gives one for; groups that lose all of them go too."""
    kept, dropped = [], []
    for group in groups:
        reasons = [reason(t) for t in group.trajectories]
        dropped += [Dropped(group.id, t.index, why) for t, why in zip(group.trajectories, reasons) if why]
        left = [t for t, why in zip(group.trajectories, reasons) if not why]
        if left:
            kept.append(replace(group, trajectories=left))
    return kept, dropped


def _cut_off(trajectory: Trajectory) -> str | None:
    if not trajectory.steps:
        return "first prompt too long"
    last = trajectory.steps[-1]
    return f"cut off at step {last.index} ({last.finish})" if last.finish in CUT_OFF else None


def _mask(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, steps=[replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in trajectory.steps])
