"""What the configuration says about estimators reaches the filters."""

import pytest

from megastep.config import load
from megastep.samples.filters import apply
from tests.runs import LOCAL
from tests.samples.rollouts import group_of, trajectory

A, B, C = 1, 2, 3


def equal_totals():
    """The same reward, earned at the first step and at the second; only the first began in one state."""
    return [
        group_of(
            *(
                trajectory(([A], [B]), ([A, B, own], [B]), rewards=rewards)
                for own, rewards in ((B, [1, 0]), (C, [0, 1]))
            )
        )
    ]


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
def test_a3_degenerate_is_what_the_configured_estimator_learns_nothing_from(key, settings, kept):
    left, dropped = apply(equal_totals(), load(LOCAL, [f"filters.{key}=true", *settings]))
    assert len(left) == kept and len(dropped) == 2 * (1 - kept)


def test_a3_supervised_training_has_no_degenerate_groups():
    settings = ["loss.type=nll", "filters.zero_variance=true"]
    left, dropped = apply([group_of(trajectory(([A], [B])))], load(LOCAL, settings))
    assert len(left) == 1 and dropped == []


def test_a3_without_the_filter_nothing_is_dropped():
    left, dropped = apply(equal_totals(), load(LOCAL, []))
    assert len(left) == 1 and dropped == []
