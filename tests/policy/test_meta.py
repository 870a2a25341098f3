"""Large models: every rank is built on the meta device, and the mapping covers all parameters."""

import pytest
import torch

from megastep.config import ParallelConfig, PolicyConfig
from megastep.distributed import parallel
from megastep.models.architecture import read_architecture
from megastep.policy.model import build_model
from tests.weights.coverage import count_mapped_parameters

BIG = {
    "qwen3-30b-a3b": (30.5e9, 16, ParallelConfig(tensor=2, pipeline=2, expert=4)),
    "qwen3-235b-a22b": (
        235.1e9,
        32,
        ParallelConfig(tensor=4, pipeline=4, expert=8, layers_per_stage=[23, 24, 24, 23]),
    ),
}


@pytest.mark.parametrize("name", BIG)
def test_the_mapping_covers_every_parameter_of_every_rank_exactly_once(name):
    size, world, layout = BIG[name]
    arch = read_architecture(f"configs/models/{name}")
    policy = PolicyConfig(precision="bf16", parallel=layout)
    total = count_mapped_parameters(arch, policy, world, device="meta")
    assert total == _parameters_by_transformers(name)
    assert total == pytest.approx(size, rel=0.01)


def test_shapes_do_not_need_the_gpu(monkeypatch):
    """Megatron would pass it, or the CPU, as the device of Transformer Engine's layers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arch = read_architecture("configs/models/qwen3-8b")
    with parallel.imagined(ParallelConfig(), 0, 1), torch.device("meta"):
        (model,) = build_model(arch, PolicyConfig(precision="bf16"))
    assert all(param.is_meta for param in model.parameters())


def _parameters_by_transformers(name: str) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(f"configs/models/{name}")
        )
    return sum(p.numel() for p in model.parameters())
