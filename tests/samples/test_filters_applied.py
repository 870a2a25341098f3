"""The filters use the configured advantage estimator."""

import pytest

from megastep.config import load
from megastep.samples.filters import apply
from tests.runs import LOCAL
from tests.samples.rollouts import group_of, trajectory

A, B, C = 1, 2, 3


def equal_totals():
    """Equal rewards, earned at the first and at the second step. The first steps share a state."""
    early = trajectory(([A], [B]), ([A, B, B], [B]), rewards=[1, 0])
    late = trajectory(([A], [B]), ([A, B, C], [B]), rewards=[0, 1])
    return [group_of(early, late)]


@pytest.mark.parametrize("key", ["zero_variance", "dynamic_sampling"])
@pytest.mark.parametrize(
    "settings, kept",
    [
        (["advantage.estimator=grpo"], 0),
        (["advantage.estimator=step_returns"], 1),
        (["advantage.estimator=gigpo"], 0),
        (["advantage.estimator=gigpo", "advantage.gamma=0.5"], 1),
        (["advantage.estimator=gigpo", "advantage.gamma=0.5", "advantage.step_coef=0"], 0),
    ],
)
def test_a3_the_configured_estimator_decides_which_groups_are_degenerate(key, settings, kept):
    left, dropped = apply(equal_totals(), load(LOCAL, [f"filters.{key}=true", *settings]))
    assert len(left) == kept and len(dropped) == 2 * (1 - kept)


def test_a3_supervised_training_has_no_degenerate_groups():
    settings = ["loss.type=nll", "filters.zero_variance=true"]
    left, dropped = apply([group_of(trajectory(([A], [B])))], load(LOCAL, settings))
    assert len(left) == 1 and dropped == []


def test_a3_without_the_filter_no_group_is_dropped():
    left, dropped = apply(equal_totals(), load(LOCAL, []))
    assert len(left) == 1 and dropped == []
