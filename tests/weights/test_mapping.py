"""Mapping tables: every parameter and tensor once; errors for weights that do not fit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megastep.config import Config
from megastep.errors import WeightsError
from megastep.models.architecture import FAMILIES, read_architecture
from megastep.trainer.rundir import check_weights_fit
from megastep.weights.hf_files import HFReader, check_empty, written_atomically
from megastep.weights.mapping import SHARDINGS, from_megatron, param_mappings, to_megatron
from tests import cases
from tests.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_every_hf_tensor_is_in_exactly_one_mapping(name, models):
    folder, _ = models(name)
    mappings = param_mappings(read_architecture(folder)).values()
    listed = [hf for mapping in mappings if not mapping.is_copy for hf, _ in mapping.hf]
    assert sorted(listed) == sorted(HFReader(folder).file_of)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_shards", [1, 2])
def test_shards_join_to_the_original_tensors(name, num_shards, models):
    folder, _ = models(name)
    arch = read_architecture(folder)
    reader = HFReader(folder)
    for mapping in param_mappings(arch).values():
        is_sharded = mapping.sharding.axis is not None
        shards = [
            to_megatron(mapping, reader, arch, shard, num_shards)
            for shard in range(num_shards if is_sharded else 1)
        ]
        for hf, tensor in from_megatron(mapping, shards, arch):
            assert torch.equal(tensor, reader(hf)), hf


def test_every_family_has_a_model_and_rules_with_known_shardings():
    assert {family for family, _ in MODELS.values()} == set(FAMILIES)
    for family in FAMILIES.values():
        assert family.rules
        assert {rule.sharding for rule in family.rules} <= set(SHARDINGS)


@pytest.fixture
def broken(models, tmp_path):
    """A function that edits the tensors of a copied model; returns the model's config."""
    folder = shutil.copytree(models("qwen3_moe")[0], tmp_path / "model")
    config = Config()
    config.model.path = str(folder)

    def change(edit):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        return config

    return change


def test_missing_tensor_is_named(broken):
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    config = broken(lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=f"tensor {name} is missing"):
        check_weights_fit(config)


def test_wrong_shape_is_named(broken):
    def edit(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(5, 128)

    with pytest.raises(
        WeightsError, match=r"k_proj.weight has shape \[5, 128\], by config.json .* \[128, 128\]"
    ):
        check_weights_fit(broken(edit))


def test_folder_without_weights(models, tmp_path):
    shutil.copy(models("llama")[0] / "config.json", tmp_path)
    with pytest.raises(WeightsError, match="no weights; model.safetensors or"):
        HFReader(tmp_path)


def test_truncated_weights(models, tmp_path):
    folder = shutil.copytree(models("llama")[0], tmp_path / "model")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        HFReader(folder)


def test_index_that_names_a_missing_file(models, tmp_path):
    folder = shutil.copytree(models("llama")[0], tmp_path / "model")
    index = {
        "weight_map": dict.fromkeys(HFReader(folder).file_of, "model-00001-of-00001.safetensors")
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="model-00001-of-00001.safetensors: missing"):
        HFReader(folder)("model.norm.weight")


def test_no_overwriting_and_no_partial_folder(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("precious")
    with pytest.raises(WeightsError, match="is not empty; give a new folder"):
        check_empty(tmp_path / "full")
    with pytest.raises(RuntimeError), written_atomically(tmp_path / "new") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


@pytest.mark.parametrize(
    "name, world, layout",
    [
        ("qwen3_moe", 2, dict(tensor=2, expert=2)),
        ("qwen2_tied", 4, dict(tensor=2, pipeline=2)),
        ("mixtral", 2, dict(expert=2)),
    ],
)
def test_export_loads_in_transformers_with_the_same_logits(
    name, world, layout, ranks, models, tmp_path
):
    from transformers import AutoModelForCausalLM

    from tests.models import some_tokens

    folder, reference = models(name)
    ranks(world).run(cases.export, folder=folder, layout=layout, destination=tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(exported(some_tokens()).logits, reference(some_tokens()).logits)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
