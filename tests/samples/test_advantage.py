"""Advantage estimators against their formulas, degenerate groups, and rounding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastep.config.schema import OUTCOME_ESTIMATORS, STEP_ESTIMATORS, estimator_problem
from megastep.errors import RolloutError
from megastep.samples.advantage import (
    advantages,
    discounted_returns,
)

from .rollouts import group_of, trajectory

A, B, C = 1, 2, 3


def group(*rewards_per_trajectory):
    turns = [([A] * (k + 1), [B]) for k in range(9)]
    return group_of(
        *[trajectory(*turns[: len(rewards)], rewards=rewards) for rewards in rewards_per_trajectory]
    )


def outcome(*rewards, turns=None):
    """Outcome rewards at the last of `turns` steps, by default 1, 2, 3, ..."""
    counts = turns or range(1, len(rewards) + 1)
    return group(*[[0.0] * (count - 1) + [reward] for reward, count in zip(rewards, counts)])


def per_trajectory(group, estimator):
    found = advantages(group, estimator)
    assert all(len(set(a.tolist())) == 1 and a.dtype == np.float32 for a in found)
    return [a[0] for a in found]


@pytest.mark.parametrize(
    "estimator, wanted",
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("grpo_nostd", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),
    ],
)
def test_s2_s4_outcome_estimators_against_their_formulas(estimator, wanted):
    assert estimator_problem(estimator) is None
    found = per_trajectory(outcome(1, 0, 0, 0), estimator)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)  # ε is 1e-6


def test_s2_rloo_is_the_reward_minus_the_mean_of_the_others():
    np.testing.assert_allclose(
        per_trajectory(outcome(3, 1, 2), "rloo"), [3 - 1.5, 1 - 2.5, 2 - 2], atol=1e-6
    )


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS)
def test_s2_a_trajectory_counts_once_for_any_number_of_steps(estimator):
    short = per_trajectory(outcome(1, 0, 0.5, turns=[1, 1, 1]), estimator)
    uneven = per_trajectory(outcome(1, 0, 0.5, turns=[7, 1, 3]), estimator)
    assert short == uneven


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS + STEP_ESTIMATORS)
def test_degenerate_groups_have_advantage_zero(estimator):
    for made in (
        outcome(0.7),
        outcome(0.1, 0.1, 0.1, turns=[1, 1, 1]),
        outcome(0.0, 0.0, turns=[2, 2]),
    ):
        assert all((a == 0).all() for a in advantages(made, estimator))


# ---------------------------------------------------------------- A2: rounding is not a signal

TENTHS = [0.1, 0.2, 0.3, 0.4]


def all_zero(made, estimator):
    return all((a == 0).all() for a in advantages(made, estimator))


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS + STEP_ESTIMATORS)
def test_a2_rewards_that_differ_by_rounding_are_equal(estimator):
    assert all_zero(outcome(0.7, 0.7000000000000001, turns=[1, 1]), estimator)
    assert all_zero(outcome(0.3, 0.1 + 0.2, float(np.float32(0.3)), turns=[1, 1, 1]), estimator)


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS)
def test_a2_equal_totals_of_different_step_rewards_give_exactly_zero(estimator):
    """0.1 + 0.2 and 0.3 differ even when each sum is rounded once."""
    assert all_zero(group([0.1, 0.2], [0.2, 0.1], [0.3], [0.1, 0.1, 0.1]), estimator)
    if estimator != "maxrl":
        assert all_zero(group([0.1, 0.2, -0.3], [0.0], [0.3, -0.1, -0.2]), estimator)


def test_a2_returns_that_differ_by_rounding_are_equal():
    """Step 0: 0.1 + 0.2 + 0.3 summed from the end, and 0.6; step 1: a sum that cancels, and 0."""
    found = advantages(group([0.1, 0.2, 0.3], [0.6, 0.0]), "step_returns")
    assert found[0][0] == found[1][0] == 0 and found[0][1] > 0
    assert all_zero(group([0.5, 0.1, 0.2, -0.3], [0.5, 0.0]), "step_returns")
    found = advantages(group([0.5, 0.1, 0.2, -0.3], [0.5, 0.0, 0.0, 0.0]), "step_returns")
    assert found[0][0] == found[0][1] == 0 and found[0][2] < 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(TENTHS), min_size=1, max_size=6), min_size=2, max_size=5),
    st.randoms(),
)
def test_a2_outcome_estimators_ignore_the_order_of_step_rewards(rewards, random):
    shuffled = [random.sample(r, len(r)) for r in rewards]
    for estimator in OUTCOME_ESTIMATORS:
        before = per_trajectory(group(*rewards), estimator)
        after = per_trajectory(group(*shuffled), estimator)
        assert before == after


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS + STEP_ESTIMATORS)
@pytest.mark.parametrize("low, high", [(0.5, 0.501), (0.0, 1e-3), (1_000_000, 1_000_001)])
def test_a2_small_differences_above_rounding_give_advantages(estimator, low, high):
    found = [a[0] for a in advantages(outcome(low, high, turns=[1, 1]), estimator)]
    assert found[0] < 0 < found[1]
    if estimator == "grpo":
        assert found[1] == pytest.approx(0.5**0.5, rel=2e-3)


def test_a2_epsilon_bounds_the_division_by_a_tiny_deviation():
    """A deviation of a tenth of ε gives at most a tenth of a full advantage."""
    found = per_trajectory(outcome(0.0, 1e-7, turns=[1, 1]), "grpo")
    assert 0 < found[1] < 0.1


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS + STEP_ESTIMATORS)
@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_reported_with_its_trajectory(estimator, reward):
    with pytest.raises(ValueError, match=f"group 0, trajectory 1: reward is {reward}"):
        advantages(outcome(1, reward), estimator)


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS + STEP_ESTIMATORS)
def test_a_trajectory_without_steps_has_no_advantages(estimator):
    found = advantages(group([1.0], [], [0.0]), estimator)
    assert [len(a) for a in found] == [1, 0, 1] and all(np.isfinite(a).all() for a in found)


def test_maxrl_rejects_negative_rewards():
    with pytest.raises(RolloutError, match="maxrl: needs rewards of 0 or more, got -1.0"):
        advantages(outcome(1, -1), "maxrl")


@pytest.mark.parametrize("estimator", ["gae", "reinforce++"])
def test_s4_temporal_estimators_are_rejected_with_a_reason(estimator):
    with pytest.raises(
        ValueError, match=r"per-token values across steps.*use one of grpo, grpo_nostd, rloo, maxrl"
    ):
        advantages(outcome(1, 0), estimator)


def test_s4_unknown_estimators_are_rejected():
    assert estimator_problem("best").startswith("must be one of grpo")


# ---------------------------------------------------------------- rewards per step


@given(st.lists(st.floats(-5, 5), max_size=8), st.floats(0, 1))
def test_returns_are_discounted_sums(rewards, gamma):
    wanted = [
        sum(gamma ** (k - t) * r for k, r in enumerate(rewards) if k >= t)
        for t in range(len(rewards))
    ]
    np.testing.assert_allclose(discounted_returns(rewards, gamma), wanted, atol=1e-9)


def test_step_returns_compare_trajectories_with_that_step():
    found = advantages(group([1, 0, 4], [0, 2], [3]), "step_returns", gamma=0.5)
    # returns: [2, 2, 4], [1, 2], [3]
    np.testing.assert_allclose(found[0], [0, 0, 0])
    np.testing.assert_allclose(found[1], [-1, 0])
    np.testing.assert_allclose(found[2], [1])


def test_step_returns_with_one_step_each_is_grpo_nostd():
    made = outcome(1, 0, 3, turns=[1, 1, 1])
    for a, b in zip(advantages(made, "step_returns"), advantages(made, "grpo_nostd")):
        assert a.tolist() == b.tolist()


def test_gigpo_adds_the_advantage_within_a_state():
    made = outcome(1, 0, turns=[2, 2])
    # Both trajectories begin in one state; their second steps are in different states.
    for i, t in enumerate(made.trajectories):
        t.steps[1].state = i
    episode = per_trajectory(made, "grpo")
    found = advantages(made, "gigpo", gamma=0.5, step_coef=2.0)
    for a, e in zip(found, episode):
        # Two samples normalise to the same ± up to ε.
        np.testing.assert_allclose(a, [e + 2 * e, e], rtol=1e-5)


def test_gigpo_uses_the_prompt_as_the_state_by_default():
    made = outcome(1, 0, turns=[1, 1])
    assert advantages(made, "gigpo")[0][0] == pytest.approx(2 * advantages(made, "grpo")[0][0])
    made.trajectories[1].steps[0].prompt_ids = np.array([C], np.int32)
    assert advantages(made, "gigpo")[0][0] == pytest.approx(advantages(made, "grpo")[0][0])


def test_a2_rounding_of_one_trajectory_does_not_affect_the_others():
    """Rounding is per value: 1e8 - 1e8 is uncertain by more than 1, 0 and 1 are not."""
    made = [
        trajectory(*[([1], [2])] * len(rewards), rewards=rewards)
        for rewards in ([0.0], [1.0], [1e8, -1e8])
    ]
    assert all(np.abs(a).max() > 0.5 for a in advantages(group_of(*made), "grpo"))
