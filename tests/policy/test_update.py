"""X1, X3, X4, S12, S14, D2, D4: one update equals a plain transformers loop over the single steps,
under every pack layout, budget, parallel layout and recomputation, with and without routing replay.
"""

import numpy as np
import pytest

from tests import cases
from tests.policy.updates import make_groups, plain_update

LAYOUTS = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, dict(tensor=2)),
    "pp2": (2, dict(pipeline=2)),
    "ep2": (2, dict(expert=2)),
    "vpp2": (2, dict(pipeline=2, virtual=2)),
    "tp2_pp2": (4, dict(tensor=2, pipeline=2)),
}
LARGE = 4096
BARELY = None  # the smallest budget that holds the longest path
EVERYTHING = [
    dict(pack_layout=pack_layout, budget_tokens=budget, replay=replay)
    for pack_layout in ("flat", "merge", "trie")
    for budget in (LARGE, 100, BARELY)
    for replay in (True, False)
]
SOME = [
    dict(pack_layout="trie", budget_tokens=100, replay=True),
    dict(pack_layout="trie", budget_tokens=BARELY, replay=False),
    dict(pack_layout="merge", budget_tokens=LARGE, replay=True),
    dict(pack_layout="flat", budget_tokens=100, replay=False),
]
MODEL = "qwen3_moe_dense_layer"  # its second layer has no router


@pytest.fixture(scope="module")
def plain(models):
    folder, _ = models(MODEL)
    return {replay: plain_update(folder, make_groups(replay), replay) for replay in (True, False)}


@pytest.mark.parametrize(
    "layout, recompute",
    [
        *((layout, []) for layout in LAYOUTS),
        *((layout, ["full"]) for layout in ("dp1", "tp2_pp2", "vpp2")),
        ("ep2", ["moe", "core_attn"]),
    ],
)
def test_one_update_equals_the_plain_loop(layout, recompute, ranks, models, plain):
    folder, _ = models(MODEL)
    world, settings = LAYOUTS[layout]
    combinations = EVERYTHING if layout in ("dp1", "tp2") and not recompute else SOME
    results = ranks(world).run(
        cases.updates,
        folder=folder,
        layout=settings,
        combinations=combinations,
        recompute=recompute,
    )
    for combination, result in zip(combinations, results[0], strict=True):
        expected = plain[combination["replay"]]
        np.testing.assert_allclose(
            result["loss"], expected["loss"], rtol=1e-4, atol=1e-6, err_msg=str(combination)
        )
        np.testing.assert_allclose(
            result["grad_norm"], expected["grad_norm"], rtol=1e-4, err_msg=str(combination)
        )
        assert result["parameters"].keys() == expected["parameters"].keys()
        for name, value in expected["parameters"].items():
            off = np.abs(result["parameters"][name] - value).max()
            assert off <= 1e-4 * np.abs(value).max(), (name, combination)


def test_routing_replay_changes_the_plain_loop(plain):
    """A precondition of the test above: it could not fail otherwise."""
    assert abs(plain[True]["loss"] - plain[False]["loss"]) > 1e-3
    assert all(gradient > 1e-6 for gradient in plain[True]["routers"].values())
