"""X15: one module knows what differs between the releases of Megatron-Core."""

import functools
import re
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megastep.distributed import cpu, megatron_version

cpu.import_megatron()
SUBMODULES = MLPSubmodules(linear_fc1=object, linear_fc2=object)
RELEASE = re.compile(r"core\.__version__|core\.package_info|is_mcore_min_version")


@pytest.mark.parametrize(
    "mlp",
    [
        ModuleSpec(module=MLP, submodules=SUBMODULES),
        functools.partial(MLP, submodules=SUBMODULES),
    ],
    ids=["0.16 and 0.17", "0.18 and 0.19"],
)
def test_x15_the_mlp_of_a_layer_spec(mlp):
    layer = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(mlp=mlp))
    assert megatron_version.mlp_submodules(layer) is SUBMODULES


def of_0_16(state, folder, async_sharded_save=False):
    torch.save({"by": "Megatron"}, Path(folder) / "common.pt")
    return ("request", async_sharded_save)


def of_0_19(state, folder, async_sharded_save=False, async_strategy="nvrx"):
    return ("request", async_sharded_save, async_strategy)


@pytest.mark.parametrize(
    ("save", "request_made", "common"),
    [
        (of_0_16, ("request", True), {"by": "Megatron"}),
        (of_0_19, ("request", True, "mcore"), {"scheduler": {"steps": 3}}),
    ],
)
def test_x15_every_release_writes_a_common_file(monkeypatch, tmp_path, save, request_made, common):
    monkeypatch.setattr(megatron_version.dist_checkpointing, "save", save)
    monkeypatch.setattr(megatron_version.dist, "get_rank", lambda: 0)
    state = {"scheduler": {"steps": 3}}
    assert megatron_version.save_checkpoint(state, tmp_path, in_background=True) == request_made
    assert torch.load(tmp_path / "common.pt") == common


def test_x15_other_ranks_write_no_common_file(monkeypatch, tmp_path):
    monkeypatch.setattr(megatron_version.dist_checkpointing, "save", of_0_19)
    monkeypatch.setattr(megatron_version.dist, "get_rank", lambda: 1)
    megatron_version.save_checkpoint({"step": 3}, tmp_path, in_background=True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unchanged_megatron(monkeypatch):
    """Undoes what replace_readers does."""
    common = megatron_version.common_strategies
    if hasattr(common, "TorchCommonLoadStrategy"):
        monkeypatch.setattr(common.TorchCommonLoadStrategy, "load_common", None)
    for name in ("load_common", "load_common_state_dict"):
        monkeypatch.setattr(megatron_version.serialization, name, None, raising=False)
    for name in ("_get_filesystem_reader", "MCoreLoadPlanner"):
        monkeypatch.setattr(megatron_version.torch_strategies, name, None)
    return monkeypatch


def test_x15_the_readers_of_0_17_and_later(unchanged_megatron):
    unchanged_megatron.delattr(
        megatron_version.common_strategies, "TorchCommonLoadStrategy", raising=False
    )
    megatron_version.replace_readers(lambda folder: ("shards", folder), dict, lambda path: [path])
    of_torch = megatron_version.torch_strategies
    assert of_torch._get_filesystem_reader("at", async_strategy="mcore") == ("shards", "at")
    assert of_torch.MCoreLoadPlanner is dict
    serialization = megatron_version.serialization
    assert serialization.load_common("at") == [Path("at")]
    # Also where common.pt is missing, which would lead 0.19 to unpickle the checkpoint's metadata.
    assert serialization.load_common_state_dict("at") == [Path("at")]


def test_x15_the_readers_of_0_16(unchanged_megatron):
    class Strategy:
        pass

    unchanged_megatron.setattr(
        megatron_version.common_strategies, "TorchCommonLoadStrategy", Strategy, raising=False
    )
    megatron_version.replace_readers(lambda folder: ("shards", folder), dict, lambda path: [path])
    of_torch = megatron_version.torch_strategies
    assert of_torch._get_filesystem_reader("at", cache_metadata=True) == ("shards", "at")
    assert Strategy().load_common("at") == [Path("at")]
    assert megatron_version.serialization.load_common is None


def test_x15_no_module_compares_releases():
    sources = {*Path("megastep").rglob("*.py"), *Path("tools").glob("*.py")}
    sources -= {*Path("megastep/doctor").glob("*.py")}  # it prints them
    assert [path for path in sources if RELEASE.search(path.read_text())] == []
