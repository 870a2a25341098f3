"""D1, D2, X4: under every parallel layout on NCCL and with recomputation, logprobs, gradient norm
and the updated policy equal those of one rank. Routing is replayed. Not run yet.
"""

import pytest

MODEL = "qwen3_moe_dense_layer"  # its second layer has no router
LENGTHEN = 20
LONG = {"max_position_embeddings": 2048}
# Ranks, and the layout.
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, dict(tensor=2)),
    "pp2": (2, dict(pipeline=2)),
    "vpp2": (2, dict(pipeline=2, virtual=2)),
    "ep2": (2, dict(expert=2)),
    "tp2_ep2_etp1": (2, dict(tensor=2, expert=2, expert_tensor=1)),
    "tp2_pp2": (4, dict(tensor=2, pipeline=2)),
    "pp2_ep2": (4, dict(pipeline=2, expert=2)),
}
# bf16 only: Transformer Engine has no fp32 kernel for context parallelism.
CONTEXT_LAYOUTS = {"cp2": (2, dict(context=2)), "cp2_tp2": (4, dict(context=2, tensor=2))}
HALF_OFFLOADED = {"optimizer.cpu_offload_fraction": 0.5}  # validation needs bf16


def with_gpus(layouts: dict) -> list:
    return [
        pytest.param(world, layout, id=name, marks=pytest.mark.gpus(world))
        for name, (world, layout) in layouts.items()
    ]


@pytest.fixture(scope="module")
def train(ranks, models):
    """`train(world, layout, ...)`: results of cases.train_a_little, by rank."""
    from tests import cases
    from tests.gpu.checks import policy_settings
    from tests.policy.updates import make_groups

    groups = make_groups(replay=True, lengthen=LENGTHEN)

    def run(world: int, layout: dict, precision: str, pack_layout="trie", updates=1, **settings):
        return ranks(world).run(
            cases.train_a_little,
            folder=models(MODEL, **LONG)[0],
            layout=layout,
            groups=groups,
            settings=policy_settings(precision, replay=True) | settings,
            pack_layout=pack_layout,
            updates=updates,
        )

    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world, layout", with_gpus(LAYOUTS))
def test_x4_a_layout_equals_one_rank(world, layout, precision, train, figure):
    from tests.gpu.checks import layout_errors

    errors = layout_errors(train(world, layout, precision), train(1, {}, precision))
    for name, error in errors.items():
        figure(f"layouts/{precision}/{name}", error)


@pytest.mark.parametrize("world, layout", with_gpus(CONTEXT_LAYOUTS))
def test_d1_context_parallelism_equals_one_rank(world, layout, train, figure):
    from tests.gpu.checks import layout_errors

    errors = layout_errors(train(world, layout, "bf16", "flat"), train(1, {}, "bf16", "flat"))
    for name, error in errors.items():
        figure(f"layouts/bf16/{name}", error)


@pytest.mark.parametrize("recompute", [["full"], ["core_attn"], ["moe", "layernorm"]], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_d2_recomputation_replays_the_same_routing(precision, recompute, train, figure):
    from tests.gpu.checks import layout_errors

    recomputed = train(1, {}, precision, **{"policy.recompute": recompute})
    for name, error in layout_errors(recomputed, train(1, {}, precision)).items():
        figure(f"layouts/{precision}/{name}", error)


@pytest.mark.gpus(4)
def test_d2_full_recomputation_with_tensor_and_pipeline_parallelism(train, figure):
    from tests.gpu.checks import layout_errors

    world, layout = LAYOUTS["tp2_pp2"]
    recomputed = train(world, layout, "fp32", **{"policy.recompute": ["full"]})
    for name, error in layout_errors(recomputed, train(1, {}, "fp32")).items():
        figure(f"layouts/fp32/{name}", error)


def test_x8_half_of_the_optimizer_on_the_cpu_trains_the_same(train, figure):
    """torch's Adam on the CPU, a fused one on the GPU."""
    from tests.gpu.checks import differences, merged

    (whole,) = train(1, {}, "bf16", updates=3)
    (half,) = train(1, {}, "bf16", updates=3, **HALF_OFFLOADED)
    figure("offload/half/after", differences(merged([half], "after"), whole["after"])["max"])
    assert half["memory"]["optimizer"] > 0
    figure("offload/half/memory", half["memory"]["optimizer"] / whole["memory"]["optimizer"])
