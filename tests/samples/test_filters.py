"""Filters drop or mask trajectories, with a reason."""

import numpy as np
import pytest

from megastep.config.schema import OUTCOME_ESTIMATORS, STEP_ESTIMATORS
from megastep.samples import make_samples
from megastep.samples.filters import Dropped, failed, finite_rewards, truncated, zero_variance
from megastep.types import FinishReason, Group, StopReason

from .rollouts import group_of, trajectory

A, B, C = 1, 2, 3


def with_rewards(id, *rewards, turns=2):
    """Outcome rewards: all steps but the last have reward 0."""
    steps = [([A] * (k + 1), [B]) for k in range(turns)]
    return group_of(
        *[trajectory(*steps, rewards=[0.0] * (turns - 1) + [r]) for r in rewards], id=id
    )


def test_x5_zero_variance_compares_trajectories_not_steps():
    """Every group has steps of different reward; only one has trajectories of different reward."""
    kept, dropped = zero_variance(
        [with_rewards(0, 1, 1), with_rewards(1, 1, 0), with_rewards(2, 0.5)], "grpo"
    )
    assert [g.id for g in kept] == [1]
    assert dropped[0] == Dropped(0, 0, "all 2 trajectories have reward 1")
    assert dropped[2] == Dropped(2, 0, "one trajectory, none to compare it with")
    assert [(d.group, d.trajectory) for d in dropped] == [(0, 0), (0, 1), (2, 0)]


def test_a_group_without_trajectories_is_dropped():
    assert zero_variance([Group(0, [])], "grpo") == ([], [])


def test_x5_rewards_spread_over_steps_are_summed():
    one = trajectory(([A], [B]), ([A], [C]), rewards=[1.0, 0.0])
    other = trajectory(([A], [B]), rewards=[1.0])
    assert zero_variance([group_of(one, other)], "grpo")[0] == []


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS + STEP_ESTIMATORS)
def test_a2_rounding_does_not_keep_a_group(estimator):
    """A group is dropped exactly if its advantages are 0."""
    assert zero_variance([with_rewards(0, 0.7, 0.7000000000000001, turns=1)], estimator)[0] == []
    assert len(zero_variance([with_rewards(0, 0.7, 0.701, turns=1)], estimator)[0]) == 1


@pytest.mark.parametrize(
    "estimator, kept",
    [*((e, False) for e in OUTCOME_ESTIMATORS), *((e, True) for e in STEP_ESTIMATORS)],
)
def test_a3_equal_totals_of_different_steps_are_kept_by_stepwise_estimators(estimator, kept):
    turns = [([A], [B]), ([A, B, C], [B])]
    early = trajectory(*turns, rewards=[1.0, 0.0])
    late = trajectory(*turns, rewards=[0.0, 1.0])
    left, dropped = zero_variance([group_of(early, late)], estimator)
    assert len(left) == kept and len(dropped) == 2 * (not kept)


def test_a3_gamma_and_step_coef_decide_whether_a_group_is_degenerate():
    """Equal totals. The first steps share a state; their returns differ if discounted."""
    early = trajectory(([A], [B]), ([A, B], [B]), rewards=[1.0, 0.0])
    late = trajectory(([A], [B]), ([A, C], [B]), rewards=[0.0, 1.0])
    group = [group_of(early, late)]
    assert zero_variance(group, "gigpo", gamma=1.0)[0] == []
    assert zero_variance(group, "gigpo", gamma=0.5)[0] == group
    assert zero_variance(group, "gigpo", gamma=0.5, step_coef=0.0)[0] == []


def test_a_group_with_advantages_on_masked_steps_only_is_dropped():
    group = with_rewards(0, 1, 0)
    for t in group.trajectories:
        t.steps[-1].finish = FinishReason.LENGTH
    masked, _ = truncated([group], "mask")
    kept, dropped = zero_variance(masked, "grpo")
    assert kept == [] and dropped[0].reason == "no trained step has an advantage other than 0"


def test_finite_rewards_drops_the_trajectory_and_keeps_its_group():
    kept, dropped = finite_rewards([with_rewards(0, 1, np.nan, 0), with_rewards(1, np.inf)])
    assert [[t.index for t in g.trajectories] for g in kept] == [[0, 2]]
    assert dropped == [Dropped(0, 1, "reward is nan"), Dropped(1, 0, "reward is inf")]
    make_samples(kept, "grpo", "token")


def test_failed_drops_trajectories_whose_environment_or_engine_failed():
    group = with_rewards(0, 1, 0, 0, 0)
    first, second, third, _ = group.trajectories
    first.stop_reason = StopReason.ENV_TIMEOUT
    first.env_metrics = {"error": "no answer within 5 s"}
    second.stop_reason = StopReason.ABORT
    third.stop_reason = StopReason.CONTEXT
    kept, dropped = failed([group])
    assert [t.index for t in kept[0].trajectories] == [2, 3]
    assert dropped == [Dropped(0, 0, "env_timeout: no answer within 5 s"), Dropped(0, 1, "abort")]


def with_truncated():
    group = with_rewards(0, 1, 0, 0)
    group.trajectories[1].steps[-1].finish = FinishReason.LENGTH
    group.trajectories[2].steps = []
    return [group]


REASONS = [Dropped(0, 1, "truncated at step 1 (length)"), Dropped(0, 2, "first prompt too long")]


def test_truncated_trajectories_can_be_kept_or_dropped():
    groups = with_truncated()
    assert truncated(groups, "keep") == (groups, [])
    kept, dropped = truncated(groups, "drop")
    assert [t.index for t in kept[0].trajectories] == [0]
    assert dropped == REASONS


def test_truncated_trajectories_can_be_masked_and_still_count_in_the_baseline():
    groups = with_truncated()
    masked, dropped = truncated(groups, "mask")
    assert [d.reason for d in dropped] == [d.reason + ", masked" for d in REASONS]
    assert not masked[0].trajectories[1].steps[0].loss_mask.any()
    assert groups[0].trajectories[1].steps[0].loss_mask.all()  # the rollout is not modified
    unmasked_samples = make_samples(groups, "grpo_nostd", "token")
    masked_samples = make_samples(masked, "grpo_nostd", "token")
    assert [s.advantage for s in unmasked_samples] == [s.advantage for s in masked_samples]
    assert [s.weight for s in masked_samples] == [0.5, 0.5, 0, 0]


def test_unknown_values_of_truncated_are_rejected():
    with pytest.raises(
        ValueError, match="filters.truncated = cut: must be one of keep, mask, drop"
    ):
        truncated([], "cut")
