"""Large models: every rank is built on the meta device, and the mapping covers all parameters."""

import pytest
import torch

from megastep.config import ParallelConfig, PolicyConfig
from megastep.distributed import parallel
from megastep.models.architecture import read_architecture
from megastep.policy.model import build_model
from megastep.weights.mapping import param_mappings, to_megatron
from megastep.weights.megatron import global_name, shard_of

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
    mappings = param_mappings(arch)
    shapes = {hf: shape for mapping in mappings.values() for hf, shape in mapping.hf}
    seen: dict[str, dict[int, torch.Size]] = {name: {} for name in mappings}
    for rank in range(world):
        with parallel.imagined(layout, rank, world):
            place = parallel.place()
            with torch.device("meta"):
                (model,) = build_model(arch, PolicyConfig(precision="bf16", parallel=layout))
                names = [global_name(local, model, arch) for local, _ in model.named_parameters()]
                assert len(set(names)) == len(names)
                for param_name, param in zip(names, model.parameters(), strict=True):
                    mapping = mappings[param_name]  # KeyError: a parameter without a mapping
                    shard, num_shards = shard_of(mapping, place)
                    expected = to_megatron(
                        mapping, lambda hf: torch.empty(shapes[hf]), arch, shard, num_shards
                    )
                    assert param.is_meta and param.shape == expected.shape
                    assert seen[param_name].setdefault(shard, param.shape) == param.shape
    total = 0
    for param_name, shards in seen.items():
        num_shards = 1 if ".local_experts." in param_name else layout.tensor
        assert sorted(shards) == list(range(num_shards)), param_name
        needed = shards if mappings[param_name].sharding.axis is not None else {0: shards[0]}
        total += sum(shape.numel() for shape in needed.values())
    assert total == sum(torch.Size(shape).numel() for shape in shapes.values())
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
