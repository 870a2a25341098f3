"""model.init=random: the seed determines the model under every parallel layout."""

import numpy as np
import pytest
import torch

from megastep.models.architecture import read_architecture
from megastep.weights.random_init import RandomWeights
from tests import cases

LAYOUTS = {
    "tp2": (2, dict(tensor=2)),
    "pp2": (2, dict(pipeline=2)),
    "vpp2": (2, dict(pipeline=2, virtual=2)),
    "ep2": (2, dict(expert=2)),
    "tp2_ep2": (2, dict(tensor=2, expert=2, expert_tensor=1)),
    "pp2_ep2": (4, dict(pipeline=2, expert=2)),
    "tp2_ep2_etp2": (4, dict(tensor=2, expert=2, expert_tensor=2)),
}
CASES = [("qwen3_moe", layout) for layout in LAYOUTS] + [
    ("llama_biases", "tp2"),
    ("qwen2_tied", "pp2"),
    ("mixtral", "tp2_ep2"),
]


@pytest.fixture(scope="module")
def alone(ranks, models):
    """The tensors of a model drawn and exported by a single rank."""
    drawn = {}

    def get(name: str) -> dict[str, np.ndarray]:
        if name not in drawn:
            drawn[name] = ranks(1).run(
                cases.fresh_tensors, folder=models(name)[0], layout={}, seed=7
            )[0]
        return drawn[name]

    return get


@pytest.mark.parametrize("name, layout", CASES)
def test_a1_random_weights_are_equal_under_every_layout(name, layout, alone, ranks, models):
    world, settings = LAYOUTS[layout]
    folder, _ = models(name)
    drawn = ranks(world).run(cases.fresh_tensors, folder=folder, layout=settings, seed=7)[0]
    assert drawn.keys() == alone(name).keys()
    for tensor, values in drawn.items():
        np.testing.assert_array_equal(values, alone(name)[tensor], err_msg=tensor)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a1_no_two_matrices_are_equal(name, alone):
    """No equal rows in any two matrices, such as two experts of a layer or two layers."""
    rows = [
        row.tobytes() for values in alone(name).values() if values.ndim == 2 for row in values[:8]
    ]
    assert len(set(rows)) == len(rows)


def test_a1_the_seed_determines_the_weights(models):
    arch = read_architecture(models("qwen3_moe")[0])
    tensor = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert torch.equal(RandomWeights(arch, 1)(tensor), RandomWeights(arch, 1)(tensor))
    assert not torch.equal(RandomWeights(arch, 1)(tensor), RandomWeights(arch, 2)(tensor))


@pytest.mark.parametrize(
    "tensor, std",
    [
        ("model.embed_tokens.weight", 0.1),
        ("lm_head.weight", 0.1),
        ("model.layers.2.self_attn.k_proj.weight", 0.1),
        ("model.layers.2.mlp.up_proj.weight", 0.1),
        ("model.layers.2.self_attn.o_proj.weight", 0.1 / 8**0.5),
        ("model.layers.2.mlp.down_proj.weight", 0.1 / 8**0.5),
    ],
)
def test_matrices_have_the_standard_deviation_of_the_config(tensor, std, alone):
    """`initializer_range` is 0.1, and 4 layers add two outputs each to the residual stream."""
    values = alone("llama_biases")[tensor]
    assert values.std() == pytest.approx(std, rel=0.03)
    assert abs(values.mean()) < 4 * std / values.size**0.5


def test_norms_start_at_one_and_biases_at_zero(alone):
    tensors = alone("llama_biases")
    norms = [values for name, values in tensors.items() if "norm" in name]
    biases = [values for name, values in tensors.items() if name.endswith(".bias")]
    assert len(norms) == 2 * 4 + 1 and len(biases) == 7 * 4
    assert all((values == 1).all() for values in norms)
    assert all((values == 0).all() for values in biases)
