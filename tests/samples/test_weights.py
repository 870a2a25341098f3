"""Token weights against their formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastep.samples import lay_out, make_samples
from megastep.samples.trie import PACK_LAYOUTS
from megastep.samples.weights import UNITS, token_weights

from .rollouts import group_of, groups, trajectory

A, B, C = 1, 2, 3


def batch():
    """Trained tokens per step: [2, 1], [3, 0] in prompt 0 and [1, 0], [0] in prompt 1."""
    return [
        group_of(
            trajectory(([A], [B, B]), ([A, B, C], [B])),
            trajectory(([A], [B, B, B]), ([A], [])),
            id=0,
        ),
        group_of(
            trajectory(([C], [B, B], [True, False]), ([C, B], [C], [False])),
            trajectory(([C], [C], [False])),
            id=1,
        ),
    ]


@pytest.mark.parametrize(
    "reduction, wanted",
    [
        ("token", [1 / 7, 1 / 7, 1 / 7, 1 / 7]),
        ("step", [1 / 8, 1 / 4, 1 / 12, 1 / 4]),
        ("trajectory", [1 / 9, 1 / 9, 1 / 9, 1 / 3]),
        ("prompt", [1 / 12, 1 / 12, 1 / 12, 1 / 2]),
    ],
)
def test_s13_weights_against_their_formulas(reduction, wanted):
    (first, second), (third, fourth) = token_weights(batch(), reduction)
    np.testing.assert_allclose([first[0], first[1], second[0], third[0]], wanted, rtol=1e-6)
    assert second[1] == third[1] == fourth[0] == 0


@settings(max_examples=80, deadline=None)
@given(
    groups(routing=("none",)),
    st.sampled_from(UNITS),
    st.sampled_from(PACK_LAYOUTS),
    st.integers(1, 4),
)
def test_s14_x4_weights_of_a_mini_batch_sum_to_one_under_every_pack_layout(
    made, reduction, pack_layout, ranks
):
    samples = make_samples(made, "step_returns", reduction)
    ranked, report = lay_out(samples, ranks, 128, 4, pack_layout)
    total = sum(m.trie.loss.weight.astype(np.float64).sum() for rank in ranked for m in rank)
    assert total == pytest.approx(1 if report.sequences_before else 0, abs=1e-6)


def test_batches_without_trained_tokens_have_weight_zero():
    assert token_weights([group_of(trajectory(([A], [B], [False])))], "step")[0][0].tolist() == [0]
    assert token_weights([], "prompt") == []


def test_unknown_reductions_are_rejected():
    with pytest.raises(
        ValueError, match="loss.reduction = batch: must be one of token, step, trajectory, prompt"
    ):
        token_weights(batch(), "batch")
