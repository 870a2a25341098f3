"""Large models: every rank is built on the meta device, and the mapping covers all parameters."""

import pytest
import torch

from megastep.config import ParallelConfig, PolicyConfig
from megastep.distributed import parallel
from megastep.models.architecture import read_architecture
from megastep.policy.model import build_model
from megastep.weights.mapping import rows_of, to_megatron
from megastep.weights.megatron import cut_of, global_name

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
    rows = rows_of(arch)
    shapes = {hf: shape for row in rows.values() for hf, shape in row.hf}
    seen: dict[str, dict[int, torch.Size]] = {row: {} for row in rows}
    for rank in range(world):
        with parallel.imagined(layout, rank, world):
            place = parallel.place()
            with torch.device("meta"):
                (model,) = build_model(arch, PolicyConfig(precision="bf16", parallel=layout))
                names = [global_name(local, model, arch) for local, _ in model.named_parameters()]
                assert len(set(names)) == len(names)
                for row_name, param in zip(names, model.parameters(), strict=True):
                    row = rows[row_name]  # KeyError: a parameter without a mapping
                    cut, cuts = cut_of(row, place)
                    assert param.is_meta
                    expected = to_megatron(row, lambda hf: torch.empty(shapes[hf]), arch, cut, cuts)
                    assert param.shape == expected.shape
                    assert seen[row_name].setdefault(cut, param.shape) == param.shape
    total = 0
    for row_name, cuts in seen.items():
        of_one = 1 if ".local_experts." in row_name else layout.tensor
        assert sorted(cuts) == list(range(of_one)), row_name
        needed = cuts if rows[row_name].form.axis is not None else {0: cuts[0]}
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
