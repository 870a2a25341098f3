import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastep.samples.credit import OUTCOME, STEPWISE, advantages, check_estimator, discounted_returns

from .rollouts import group_of, trajectory

A, B, C = 1, 2, 3


def group(*rewards_per_trajectory):
    turns = [([A] * (k + 1), [B]) for k in range(9)]
    return group_of(*[trajectory(*turns[: len(rewards)], rewards=rewards) for rewards in rewards_per_trajectory])


def outcome(*rewards, turns=None):
    """Outcome rewards on the last of 1, 2, 3, ... steps."""
    return group(*[[0.0] * (n - 1) + [r] for r, n in zip(rewards, turns or range(1, len(rewards) + 1))])


def per_trajectory(group, estimator, **settings):
    found = advantages(group, estimator, **settings)
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
    assert check_estimator(estimator) is None
    np.testing.assert_allclose(per_trajectory(outcome(1, 0, 0, 0), estimator), wanted, rtol=1e-6)


def test_s2_rloo_is_the_reward_minus_the_mean_of_the_others():
    np.testing.assert_allclose(per_trajectory(outcome(3, 1, 2), "rloo"), [3 - 1.5, 1 - 2.5, 2 - 2], atol=1e-6)


@pytest.mark.parametrize("estimator", OUTCOME)
def test_s2_a_trajectory_counts_once_however_many_steps_it_took(estimator):
    short = per_trajectory(outcome(1, 0, 0.5, turns=[1, 1, 1]), estimator)
    uneven = per_trajectory(outcome(1, 0, 0.5, turns=[7, 1, 3]), estimator)
    assert short == uneven


@pytest.mark.parametrize("estimator", OUTCOME + STEPWISE)
def test_degenerate_groups_give_exactly_zero(estimator):
    for made in (outcome(0.7), outcome(0.1, 0.1, 0.1, turns=[1, 1, 1]), outcome(0.0, 0.0, turns=[2, 2])):
        assert all((a == 0).all() for a in advantages(made, estimator))


@pytest.mark.parametrize("estimator", OUTCOME + STEPWISE)
@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_an_error_that_names_it(estimator, reward):
    with pytest.raises(ValueError, match=f"group 0, trajectory 1: reward is {reward}"):
        advantages(outcome(1, reward), estimator)


@pytest.mark.parametrize("estimator", OUTCOME + STEPWISE)
def test_a_trajectory_without_steps_gets_no_advantage_and_breaks_nothing(estimator):
    found = advantages(group([1.0], [], [0.0]), estimator)
    assert [len(a) for a in found] == [1, 0, 1] and all(np.isfinite(a).all() for a in found)


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match="maxrl: needs rewards of 0 or more, got -1.0"):
        advantages(outcome(1, -1), "maxrl")


@pytest.mark.parametrize("estimator", ["gae", "reinforce++"])
def test_s4_temporal_estimators_are_refused_with_a_reason(estimator):
    with pytest.raises(ValueError, match=r"per-token values across steps.*use one of grpo, grpo_nostd, rloo, maxrl"):
        advantages(outcome(1, 0), estimator)


def test_s4_unknown_estimators_are_refused():
    assert check_estimator("best").startswith("must be one of grpo")


# ---------------------------------------------------------------- rewards per step


@given(st.lists(st.floats(-5, 5), max_size=8), st.floats(0, 1))
def test_returns_are_discounted_sums(rewards, discount):
    wanted = [sum(discount ** (k - t) * r for k, r in enumerate(rewards) if k >= t) for t in range(len(rewards))]
    np.testing.assert_allclose(discounted_returns(rewards, discount), wanted, atol=1e-9)


def test_step_returns_compare_with_the_trajectories_that_took_the_step():
    found = advantages(group([1, 0, 4], [0, 2], [3]), "step_returns", discount=0.5)
    # returns: [2, 2, 4], [1, 2], [3]
    np.testing.assert_allclose(found[0], [0, 0, 0])
    np.testing.assert_allclose(found[1], [-1, 0])
    np.testing.assert_allclose(found[2], [1])


def test_step_returns_with_one_step_each_is_grpo_nostd():
    made = outcome(1, 0, 3, turns=[1, 1, 1])
    for a, b in zip(advantages(made, "step_returns"), advantages(made, "grpo_nostd")):
        assert a.tolist() == b.tolist()


def test_gigpo_adds_the_comparison_within_a_state():
    made = outcome(1, 0, turns=[2, 2])
    # Both trajectories begin in one state; their second steps are in states of their own.
    for i, t in enumerate(made.trajectories):
        t.steps[1].state = i
    episode = per_trajectory(made, "grpo")
    found = advantages(made, "gigpo", discount=0.5, step_weight=2.0)
    for a, e in zip(found, episode):
        np.testing.assert_allclose(a, [e + 2 * e, e], rtol=1e-6)  # two samples normalise to the same ±


def test_gigpo_takes_the_prompt_as_the_state_where_none_is_given():
    made = outcome(1, 0, turns=[1, 1])
    assert advantages(made, "gigpo")[0][0] == pytest.approx(2 * advantages(made, "grpo")[0][0])
    made.trajectories[1].steps[0].prompt_ids = np.array([C], np.int32)
    assert advantages(made, "gigpo")[0][0] == pytest.approx(advantages(made, "grpo")[0][0])
