"""X14, D8: the Transformer Engine policy equals the CPU policy, without a GPU.

Ranks with Transformer Engine are processes of their own (install.py). Their layers, norms, grouped
experts and optimizer are Transformer Engine's Python code over the torch functions of extension.py;
core attention is that of the CPU spec.
"""

import functools
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import cases
from tests.models import MODELS
from tests.policy.test_layouts import CASES as ALL_LAYOUTS
from tests.policy.test_layouts import LAYOUTS
from tests.ranks import RankPool
from tests.te import cases as te_cases
from tests.te import wheel
from tests.te.install import install

MODEL = "qwen3_moe_dense_layer"  # its second layer has no router
UPDATES = [
    *((name, "tp2") for name in MODELS),
    *((MODEL, layout) for layout in ("dp2", "ep2", "pp2", "vpp2", "tp2_ep2_etp1")),
    ("qwen2_tied", "pp2"),
]
# By layout: what is recomputed, and what then runs more often.
RECOMPUTED = [
    ("pp2", ["full"], "TELayerNormColumnParallelLinear"),
    ("ep2", ["core_attn", "mlp", "moe"], "TEGroupedMLP"),
    ("tp2_ep2_etp1", ["moe_act", "layernorm"], "expert_activation"),
    ("tp2_ep2_etp1", ["moe_act", "layernorm"], "RMSNorm"),
]
# Norms are built by TENorm.
TE_CLASSES = {
    "megatron.TEColumnParallelGroupedLinear",
    "megatron.TEGroupedMLP",
    "megatron.TELayerNormColumnParallelLinear",
    "megatron.TERowParallelGroupedLinear",
    "megatron.TERowParallelLinear",
    "transformer_engine.FusedAdam",
    "transformer_engine.RMSNorm",
}


@pytest.fixture(scope="module")
def te_ranks(tmp_path_factory):
    """Two ranks with Transformer Engine."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs Transformer Engine on the GPU")
    unpacked = wheel.unpack(tmp_path_factory.mktemp("te"))
    pool = RankPool(2, functools.partial(install, unpacked))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def update(te_ranks, ranks, models):
    """`update(spec, model, layout, **settings)`: results by rank, once for the same arguments."""

    @functools.cache
    def get(spec: str, name: str, layout: str, recompute: tuple[str, ...] = (), precision="fp32"):
        pool = te_ranks if spec == "te" else ranks(2)
        settings = {"policy.recompute": list(recompute), "policy.precision": precision}
        return pool.run(
            te_cases.update, folder=models(name)[0], layout=LAYOUTS[layout][1], settings=settings
        )

    return get


def largest_difference(te: list[dict], cpu: list[dict]) -> float:
    """Of the logprobs of all ranks."""
    compared = []
    for by_te, by_cpu in zip(te, cpu, strict=True):
        assert by_te["logprobs"].keys() == by_cpu["logprobs"].keys()
        compared += [(values, by_cpu["logprobs"][key]) for key, values in by_te["logprobs"].items()]
    assert compared
    return max(np.abs(values - expected).max() for values, expected in compared)


def assert_equal_updates(te: list[dict], cpu: list[dict]) -> None:
    assert largest_difference(te, cpu) <= 1e-5
    assert te[0]["grad_norm"] == pytest.approx(cpu[0]["grad_norm"], rel=1e-5)
    assert te[0]["loss"] == pytest.approx(cpu[0]["loss"], rel=1e-5, abs=1e-6)
    assert te[0]["weights"].keys() == cpu[0]["weights"].keys()
    for name, value in cpu[0]["weights"].items():
        off = np.abs(te[0]["weights"][name] - value).max()
        assert off <= 1e-5 * np.abs(value).max(), name


@pytest.mark.parametrize("name, layout", UPDATES)
def test_x14_an_update_equals_the_cpu_spec(name, layout, update):
    """Logprobs, loss, gradient norm, and all weights after Adam's step."""
    te = update("te", name, layout)
    cpu = update("cpu", name, layout)
    assert te[0]["replayed"] == cpu[0]["replayed"] == name.startswith("qwen3_moe")
    assert_equal_updates(te, cpu)


@pytest.mark.parametrize("layout, recompute, more_often", RECOMPUTED)
def test_x14_recomputation_changes_no_update(layout, recompute, more_often, update):
    te = update("te", MODEL, layout, tuple(recompute))
    once = update("te", MODEL, layout)
    assert te[0]["calls"][more_often] > once[0]["calls"][more_often] > 0
    assert_equal_updates(te, update("cpu", MODEL, layout))


def test_x14_bf16_is_close(update):
    te = update("te", MODEL, "ep2", precision="bf16")
    cpu = update("cpu", MODEL, "ep2", precision="bf16")
    assert largest_difference(te, cpu) <= 0.1
    assert te[0]["grad_norm"] == pytest.approx(cpu[0]["grad_norm"], rel=0.02)


def test_x14_the_policy_is_made_of_transformer_engine(update):
    classes = update("te", MODEL, "tp2_ep2_etp1")[0]["classes"]
    found = {name for name in classes if re.match(r"megatron\.TE|transformer_engine\.", name)}
    assert found == TE_CLASSES
    assert classes["megatron.TransformerLayer"] == 4
    assert classes["megatron.TELayerNormColumnParallelLinear"] == 4 + 1  # qkv, and one dense MLP
    assert classes["megatron.TEGroupedMLP"] == 3
    assert classes["transformer_engine.RMSNorm"] == 2 * 4 + 3 + 1  # q and k, before MoE, final
    assert classes["transformer_engine.FusedAdam"] == 2  # experts have their own
    assert classes["megatron.ColumnParallelLinear"] == 1  # the output layer
    on_cpu = {"megastep.RMSNorm", "megatron.RowParallelLinear", "megatron.SequentialMLP"}
    assert not on_cpu & classes.keys()
    cpu = update("cpu", MODEL, "tp2_ep2_etp1")[0]["classes"]
    assert on_cpu <= cpu.keys() and not TE_CLASSES & cpu.keys()


def test_x14_the_mapping_covers_every_parameter_under_every_layout(te_ranks, models):
    """Every model × parallel layout; pipeline stages and experts are numbered over the model."""
    wanted = [(name, layout, models(name)[0], *LAYOUTS[layout]) for name, layout in ALL_LAYOUTS]
    by_rank = te_ranks.run(te_cases.count_parameters, wanted=wanted)
    counted = {key: total for found in by_rank for key, total in found.items()}
    assert counted.keys() == set(ALL_LAYOUTS)
    for (name, layout), total in counted.items():
        model = models(name)[1]
        embeddings = 1 if model.config.tie_word_embeddings else 2
        padding = (256 - model.config.vocab_size) * model.config.hidden_size * embeddings
        expected = sum(p.numel() for p in model.parameters()) + padding
        assert total == expected, (name, layout)


@pytest.mark.parametrize("saves", ["te", "cpu"])
def test_x14_checkpoints_move_between_the_specs(saves, te_ranks, ranks, models, tmp_path):
    """Weights and Adam's state, also to another parallel layout."""
    folder, _ = models(MODEL)
    pools = {"te": te_ranks, "cpu": ranks(2)}
    saving = pools.pop(saves)
    (loading,) = pools.values()
    expected = saving.run(
        cases.save_then_continue,
        folder=folder,
        layout=dict(expert=2),
        root=tmp_path,
        before=2,
        after=2,
    )
    found = loading.run(
        cases.load_and_continue,
        folder=folder,
        layout=dict(tensor=2),
        checkpoint=tmp_path / "step_2",
        steps=2,
    )
    for step, other in zip(found[0], expected[0], strict=True):
        assert step == pytest.approx(other, rel=1e-5)


def test_x14_a_partly_offloaded_adam_counts_on_after_a_checkpoint(te_ranks):
    """Its bias correction depends on the count."""
    assert te_ranks.run(te_cases.steps_of_hybrid_adam, loaded=5, steps=3) == [8, 8]


# ---------------------------------------------------------------- the wheel


def test_x14_the_wheel_is_the_release_that_gpus_get():
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    (required,) = [r for r in extras["gpu"] if r.startswith("transformer-engine")]
    assert f"transformer-engine=={required.partition('==')[2]} " in wheel.PIN.read_text()


def test_x14_ci_fails_without_the_wheel(monkeypatch, tmp_path):
    """A file with another hash is not used; without one, only a developer's run is skipped."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "transformer_engine-2.11.0-py3-none-any.whl").write_bytes(b"another")

    def offline(folder):
        raise FileNotFoundError("no network")

    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr(wheel, "fetch", offline)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(FileNotFoundError, match="no network"):
        wheel.unpack(tmp_path)
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no network"):
        wheel.unpack(tmp_path)
