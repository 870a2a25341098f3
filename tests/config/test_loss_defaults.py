"""Defaults of `loss` that depend on loss.type, and combinations that lead to a warning."""

import pytest

from megastep.config import load, training_warnings
from tests.bad_input import harness

LOCAL = "configs/local.yaml"


@pytest.mark.parametrize(
    "type, low, high", [("ppo_clip", 0.2, 0.2), ("gspo", 3e-4, 4e-4), ("cispo", 1.0, 4.0)]
)
def test_clip_bounds_follow_from_the_loss_type_unless_given(type, low, high):
    """A13"""
    loss = load(LOCAL, [f"loss.type={type}"]).policy_loss
    assert (loss.clip_low, loss.clip_high) == (low, high)
    bounds = ["loss.clip_low=0.3", "loss.clip_high=0.5"]
    loss = load(LOCAL, [f"loss.type={type}", *bounds]).policy_loss
    assert (loss.clip_low, loss.clip_high) == (0.3, 0.5)


SEVERAL, ONE = "train.mini_batch_prompts=8", "train.mini_batch_prompts=16"


@pytest.mark.parametrize(
    "given, start, why",
    [
        (["loss.type=gspo"], "loss.reduction = token: ", "one ratio per model call"),
        (["loss.type=gspo", "loss.reduction=step"], None, None),
        (["loss.type=ppo_clip", SEVERAL], None, None),
        (
            ["loss.type=reinforce", SEVERAL],
            "train.mini_batch_prompts = 8: ",
            "use train.mini_batch_prompts = 16, or loss.type = ppo_clip",
        ),
        (["loss.type=reinforce", ONE], None, None),
    ],
)
def test_unusual_combinations_are_a_warning(given, start, why):
    """A13: one line at the start of `train`, which continues."""
    lines = training_warnings(load(LOCAL, ["rollout.prompts=16", *given]))
    assert len(lines) == (start is not None)
    assert all(line.startswith(start) and why in line for line in lines)
    result = harness.run(
        "train", LOCAL, "rollout.prompts=16", *given, "data.held_out=0", limit_s=120
    )
    assert result.code == 2  # a later check: data.held_out
    printed = [line for line in result.lines if line.startswith("warning: ")]
    assert printed == [f"warning: {line}" for line in lines]


def test_quantized_rollouts_without_a_correction_are_a_warning():
    def lines(*given):
        return training_warnings(load(LOCAL, ["engine.quantization=fp8", *given], has_cuda=True))

    (line,) = lines()
    assert line.startswith("engine.quantization = fp8: rollouts sample from other probabilities")
    assert lines("loss.importance_sampling.mode=truncate") == []
