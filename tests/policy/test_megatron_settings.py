"""X14: Megatron's own settings reach its configs, and change nothing but the speed."""

import numpy as np
import pytest

from tests import cases

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}
LAYOUTS = {
    "dp2": (2, {}),
    "ep2": (2, dict(expert=2)),
    "vpp2": (2, dict(pipeline=2, virtual=2)),
    "dp2_pp2": (4, dict(pipeline=2)),
}


def learned(ranks, models, tmp_path, layout: str, megatron: dict, **settings) -> list[dict]:
    folder, _ = models(settings.pop("model", "qwen3_moe_dense_layer"))
    world, parallel = LAYOUTS[layout]
    return ranks(world).run(
        cases.learn_and_read,
        folder=folder,
        layout=parallel,
        # A large epsilon keeps Adam smooth where a gradient is almost 0.
        settings={"policy.megatron": megatron, "optimizer.eps": 1e-4, **settings},
        root=tmp_path / ("with" if megatron else "without"),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_x14_overlap_changes_neither_updates_nor_what_is_read_after_them(
    layout, ranks, models, tmp_path
):
    plain = learned(ranks, models, tmp_path, layout, {})
    overlapped = learned(ranks, models, tmp_path, layout, OVERLAP)
    assert_equal(plain, overlapped)
    assert max(plain[0]["buckets"]) == 1 < max(overlapped[0]["buckets"])


def assert_equal(plain: list[dict], overlapped: list[dict]) -> None:
    for ours, theirs in zip(overlapped, plain, strict=True):
        for our_metrics, their_metrics in zip(ours["metrics"], theirs["metrics"], strict=True):
            assert our_metrics == pytest.approx(their_metrics, rel=1e-6)
        for our_tensors, their_tensors in zip(ours["exported"], theirs["exported"], strict=True):
            assert our_tensors.keys() == their_tensors.keys()
            for name, value in their_tensors.items():
                np.testing.assert_allclose(our_tensors[name], value, atol=1e-6, err_msg=name)
        for kind in ("logprobs", "reloaded"):
            for our_logprobs, their_logprobs in zip(ours[kind], theirs[kind], strict=True):
                np.testing.assert_allclose(our_logprobs, their_logprobs, atol=1e-5)
