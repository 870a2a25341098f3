import numpy as np
import pytest

from megastep.samples import make_samples
from megastep.samples.advantage import OUTCOME, STEPWISE
from megastep.samples.filters import Dropped, failed, finite_rewards, truncated, zero_variance
from megastep.types import Group

from .rollouts import group_of, trajectory

A, B, C = 1, 2, 3


def with_rewards(id, *rewards, turns=2):
    """Outcome rewards: the first steps of every trajectory have reward 0."""
    steps = [([A] * (k + 1), [B]) for k in range(turns)]
    return group_of(
        *[trajectory(*steps, rewards=[0.0] * (turns - 1) + [r]) for r in rewards], id=id
    )


def test_x5_zero_variance_looks_at_trajectories_not_at_steps():
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
    one, other = (
        trajectory(([A], [B]), ([A], [C]), rewards=[1.0, 0.0]),
        trajectory(([A], [B]), rewards=[1.0]),
    )
    assert zero_variance([group_of(one, other)], "grpo")[0] == []


@pytest.mark.parametrize("estimator", OUTCOME + STEPWISE)
def test_a2_rounding_does_not_keep_a_group(estimator):
    """One definition of a degenerate group: what is dropped is what has advantage 0."""
    assert zero_variance([with_rewards(0, 0.7, 0.7000000000000001, turns=1)], estimator)[0] == []
    assert len(zero_variance([with_rewards(0, 0.7, 0.701, turns=1)], estimator)[0]) == 1


@pytest.mark.parametrize(
    "estimator, learns", [*((e, False) for e in OUTCOME), *((e, True) for e in STEPWISE)]
)
def test_a3_equal_totals_of_different_steps_are_kept_for_estimators_of_steps(estimator, learns):
    turns = [([A], [B]), ([A, B, C], [B])]
    early, late = trajectory(*turns, rewards=[1.0, 0.0]), trajectory(*turns, rewards=[0.0, 1.0])
    kept, dropped = zero_variance([group_of(early, late)], estimator)
    assert len(kept) == learns and len(dropped) == 2 * (not learns)


def test_a3_discount_and_step_weight_decide_too():
    """Equal totals; the only step that both took from one state is the first, whose returns differ if discounted."""
    early, late = (
        trajectory(([A], [B]), (p, [B]), rewards=r)
        for p, r in (([A, B], [1.0, 0.0]), ([A, C], [0.0, 1.0]))
    )
    group = [group_of(early, late)]
    assert zero_variance(group, "gigpo", gamma=1.0)[0] == []
    assert zero_variance(group, "gigpo", gamma=0.5)[0] == group
    assert zero_variance(group, "gigpo", gamma=0.5, step_coef=0.0)[0] == []


def test_a_group_whose_advantages_fall_on_masked_steps_is_dropped():
    group = with_rewards(0, 1, 0)
    for t in group.trajectories:
        t.steps[-1].finish = "length"
    masked, _ = truncated([group], "mask")
    kept, dropped = zero_variance(masked, "grpo")
    assert kept == [] and dropped[0].reason == "no trained step has an advantage other than 0"


def test_finite_rewards_drops_the_trajectory_and_keeps_its_group():
    kept, dropped = finite_rewards([with_rewards(0, 1, np.nan, 0), with_rewards(1, np.inf)])
    assert [[t.index for t in g.trajectories] for g in kept] == [[0, 2]]
    assert dropped == [Dropped(0, 1, "reward is nan"), Dropped(1, 0, "reward is inf")]
    make_samples(kept, "grpo", "token")


def test_failed_drops_what_proves_nothing():
    group = with_rewards(0, 1, 0, 0, 0)
    first, second, third, _ = group.trajectories
    first.stop_reason, first.env_metrics = "env_timeout", {"error": "no answer within 5 s"}
    second.stop_reason = "abort"
    third.stop_reason = "context"
    kept, dropped = failed([group])
    assert [t.index for t in kept[0].trajectories] == [2, 3]
    assert dropped == [Dropped(0, 0, "env_timeout: no answer within 5 s"), Dropped(0, 1, "abort")]


def cut_off():
    group = with_rewards(0, 1, 0, 0)
    group.trajectories[1].steps[-1].finish = "length"
    group.trajectories[2].steps = []
    return [group]


REASONS = [Dropped(0, 1, "truncated at step 1 (length)"), Dropped(0, 2, "first prompt too long")]


def test_over_long_trajectories_can_be_kept_or_dropped():
    groups = cut_off()
    assert truncated(groups, "keep") == (groups, [])
    kept, dropped = truncated(groups, "drop")
    assert [t.index for t in kept[0].trajectories] == [0]
    assert dropped == REASONS


def test_over_long_trajectories_can_be_masked_and_still_count_in_the_baseline():
    groups = cut_off()
    masked, dropped = truncated(groups, "mask")
    assert [d.reason for d in dropped] == [d.reason + ", masked" for d in REASONS]
    assert not masked[0].trajectories[1].steps[0].loss_mask.any()
    assert groups[0].trajectories[1].steps[0].loss_mask.all()  # the rollout itself is not changed
    whole, part = (make_samples(g, "grpo_nostd", "token") for g in (groups, masked))
    assert [s.advantage for s in whole] == [s.advantage for s in part]
    assert [s.weight for s in part] == [0.5, 0.5, 0, 0]


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(
        ValueError, match="filters.truncated = cut: must be one of keep, mask, drop"
    ):
        truncated([], "cut")
