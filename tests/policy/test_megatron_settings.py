"""Megatron's own settings reach its configs, and change nothing but the speed."""

import ast
import inspect
from dataclasses import fields
from importlib.metadata import version

import numpy as np
import pytest

from megastep.config import REJECTED_MEGATRON, Config, ParallelConfig, PolicyConfig, load
from megastep.config.megatron import NEEDS_CUDA
from megastep.errors import ConfigError
from megastep.models.architecture import read_architecture
from megastep.policy import megatron_settings, model, optimizer
from megastep.policy.megatron_settings import (
    KINDS,
    check_settings,
    ddp_settings,
    optimizer_settings,
    transformer_settings,
)
from tests import cases
from tests.bad_input.harness import CONFIG, rejected

MOE = read_architecture("configs/models/tiny-qwen3-moe")
DENSE = read_architecture("configs/models/qwen3-8b")
NAMES = {found.name for kind in KINDS for found in fields(kind)}

# ---------------------------------------------------------------- names and values


def problems(**settings) -> list[str]:
    config = Config()
    config.policy.megatron = settings
    with pytest.raises(ConfigError) as error:
        check_settings(config)
    return error.value.problems


@pytest.mark.parametrize(
    "name, value, problem",
    [
        ("overlap_grad_reduse", True, "did you mean overlap_grad_reduce?"),
        ("hidden_dropouts", 0.1, "unknown to megatron-core"),
        ("zzz", 1, "its names are those of TransformerConfig, DistributedDataParallelConfig and"),
        ("overlap_grad_reduce", 1, "= 1: must be bool"),
        ("bucket_size", True, "= True: must be int, or null"),
        ("bucket_size", 1e6, "= 1000000.0: must be int, or null"),
        ("decoupled_lr", "fast", "= 'fast': must be float, or null"),
        ("moe_router_dtype", "fp16", "= 'fp16': must be one of fp32, fp64, or null"),
        ("attention_backend", "quick", "= 'quick': must be one of flash, fused, unfused, local"),
        ("offload_modules", [1], "= [1]: must be list[str], or null"),
    ],
)
def test_unknown_names_and_wrong_types_are_rejected(name, value, problem):
    (line,) = problems(**{name: value})
    assert line.startswith(f"policy.megatron.{name}") and problem in line, line


def test_no_rejected_name_is_suggested():
    (line,) = problems(hidden_dropou=0.1)
    assert "hidden_dropout?" not in line


@pytest.mark.parametrize(
    "given",
    [
        dict(overlap_grad_reduce=True, bucket_size=None, decoupled_lr=1),
        dict(moe_router_dtype="fp64", attention_backend="flash", cp_comm_type=["p2p", "a2a"]),
    ],
)
def test_values_of_the_fields_types_are_accepted(given):
    config = Config()
    config.policy.megatron = given
    check_settings(config)


@pytest.mark.skipif(
    version("megatron-core") != "0.16.1", reason="later releases have removed some of the names"
)
def test_every_rejected_name_exists():
    assert REJECTED_MEGATRON.keys() <= NAMES and set(NEEDS_CUDA) <= NAMES - REJECTED_MEGATRON.keys()


def test_all_that_megastep_sets_itself_is_rejected():
    """Except the defaults, which policy.megatron replaces."""
    assigned = set()
    for module in (model, optimizer):
        for call in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                if call.func.id == "dict" or call.func.id.endswith("Config"):
                    assigned |= {keyword.arg for keyword in call.keywords}
    own = (assigned - {None}) & NAMES
    assert {"calculate_per_token_loss", "lr", "average_in_collective", "num_moe_experts"} <= own
    assert own <= REJECTED_MEGATRON.keys()


@pytest.mark.parametrize("name", sorted(NAMES - REJECTED_MEGATRON.keys()))
def test_every_accepted_name_is_passed_on(name):
    for kind in KINDS:
        if name in {found.name for found in fields(kind)}:
            value = "flash" if name == "attention_backend" else 3
            given = megatron_settings.given(kind, PolicyConfig(megatron={name: value}))
            assert given.keys() == {name}


REPLAYED = "a fused router selects its experts without asking for the recorded ones"


@pytest.mark.parametrize(
    "override, problem",
    [
        ("hidden_dropout=0.1", "hidden_dropout = 0.1: not accepted: logprobs would be random"),
        ("moe_expert_capacity_factor=1.5", "the tokens that share its micro-batch"),
        ("calculate_per_token_loss=false", "losses are weighted sums"),
        ("num_layers=3", "num_layers = 3: not accepted: the model folder decides it"),
        ("tensor_model_parallel_size=2", "not accepted: policy.parallel decides it"),
        ("moe_router_fusion=true", f"moe_router_fusion = True: {REPLAYED}"),
        ("moe_permute_fusion=true", "there is no GPU here"),
        ("moe_token_dispatcher_type=flex", "needs DeepEP or HybridEP, and there is no GPU here"),
        ("fp8_margin=1", "fp8_margin = 1: needs policy.fp8"),
        ("overlap_grad_reduse=true", "did you mean overlap_grad_reduce?"),
        ("moe_token_dispatcher_type=allgather", "Megatron rejects it (Token dispatcher type"),
    ],
)
def test_train_rejects_it_before_any_process_starts(override, problem):
    lines = rejected("train", CONFIG, f"policy.megatron.{override}", names=problem, limit_s=120)
    assert len([line for line in lines if "policy.megatron" in line]) == 1 + ("flex" in override)


@pytest.mark.parametrize(
    "override, problem",
    [
        ("policy.fp8=blockwise", "policy.fp8 = blockwise: needs Transformer Engine, and there"),
        ("engine.quantization=fp8", "engine.quantization = fp8: needs vLLM's GPU kernels, and"),
        ("policy.fp8=int4", "policy.fp8 = int4: must be one of blockwise, mxfp8, tensorwise"),
        ("engine.quantization=awq", "engine.quantization = awq: must be one of fp8"),
    ],
)
def test_fp8_is_rejected_on_a_cpu(override, problem):
    rejected("train", CONFIG, override, "policy.precision=bf16", names=problem)


def test_plan_checks_the_names_too():
    rejected("plan", CONFIG, "policy.megatron.bucket_sizes=3", names="bucket_size?", limit_s=120)


def test_a_dense_model_has_no_settings_of_experts():
    lines = rejected(
        "plan", "configs/h100/qwen3-8b.yaml", "policy.megatron.moe_permute_fusion=true"
    )
    assert "the model has no experts" in lines[0]


# ---------------------------------------------------------------- defaults


def test_on_a_cpu_the_defaults_are_megatrons_own():
    policy = PolicyConfig()
    for arch in (MOE, DENSE):
        settings = transformer_settings(arch, policy, on_cuda=False)
        defaults = {found.name: found.default for found in fields(KINDS[0])}
        changed = {name: value for name, value in settings.items() if value != defaults[name]}
        assert changed == {"moe_token_dispatcher_type": "alltoall"}
    assert not any(ddp_settings(policy, on_cuda=False).values())
    assert not any(optimizer_settings(policy, on_cuda=False).values())


def on_cuda(arch, has_deepep: bool, monkeypatch, **policy) -> dict:
    monkeypatch.setattr(megatron_settings, "find_spec", lambda name: has_deepep or None)
    return transformer_settings(arch, PolicyConfig(**policy), on_cuda=True)


def test_d8_on_a_gpu_kernels_are_fused_and_communication_overlaps(monkeypatch):
    settings = on_cuda(MOE, False, monkeypatch)
    assert settings["gradient_accumulation_fusion"] and settings["moe_permute_fusion"]
    assert settings["moe_router_dtype"] == "fp32"
    assert settings["moe_token_dispatcher_type"] == "alltoall"
    assert "moe_permute_fusion" not in on_cuda(DENSE, False, monkeypatch)
    ddp = ddp_settings(PolicyConfig(), on_cuda=True)
    assert ddp == {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert optimizer_settings(PolicyConfig(), on_cuda=True)["overlap_param_gather"]


@pytest.mark.parametrize(
    "ranks, precision, installed, dispatcher",
    [
        (8, "bf16", True, "flex"),
        (8, "bf16", False, "alltoall"),
        (1, "bf16", True, "alltoall"),
        (8, "fp32", True, "alltoall"),
        (12, "bf16", True, "alltoall"),  # no configuration of DeepEP
    ],
)
def test_d8_deepep_dispatches_where_it_can(ranks, precision, installed, dispatcher, monkeypatch):
    parallel = ParallelConfig(expert=ranks)
    settings = on_cuda(MOE, installed, monkeypatch, precision=precision, parallel=parallel)
    assert settings["moe_token_dispatcher_type"] == dispatcher


def test_given_settings_replace_the_defaults(monkeypatch):
    given = dict(moe_router_dtype=None, gradient_accumulation_fusion=False)
    settings = on_cuda(MOE, False, monkeypatch, megatron=given)
    assert settings.items() >= given.items()
    assert "moe_router_dtype" not in on_cuda(DENSE, False, monkeypatch, megatron=given)
    policy = PolicyConfig(megatron=dict(overlap_param_gather=False))
    assert not ddp_settings(policy, on_cuda=True)["overlap_param_gather"]
    assert not optimizer_settings(policy, on_cuda=True)["overlap_param_gather"]


@pytest.mark.parametrize(
    "recipe, format, block",
    [("blockwise", "e4m3", 16), ("mxfp8", "e4m3", 32), ("tensorwise", "hybrid", 16)],
)
def test_fp8_recipes_reach_megatron_and_the_packing(recipe, format, block, monkeypatch):
    settings = on_cuda(DENSE, False, monkeypatch, fp8=recipe)
    assert settings["fp8"] == format and settings["fp8_recipe"] == recipe
    policy = PolicyConfig(fp8=recipe, parallel=ParallelConfig(tensor=2))
    assert policy.align_tokens == 2 * block
    assert optimizer_settings(policy, on_cuda=True)["fp8_recipe"] == recipe


def test_fp8_needs_bf16_weights_and_whole_blocks():
    recipe = ["configs/h100/qwen3-8b.yaml", "policy.fp8=mxfp8"]
    load(recipe[0], recipe[1:], has_cuda=True)
    for override, problem in (
        ("policy.precision=fp32", "needs policy.precision=bf16"),
        ("policy.parallel.context=2", "needs policy.parallel.context = 1"),
    ):
        assert any(problem in line for line in rejected("plan", *recipe, override))


# ---------------------------------------------------------------- real ranks

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}
LAYOUTS = {
    "dp2": (2, {}),
    "ep2": (2, dict(expert=2)),
    "vpp2": (2, dict(pipeline=2, virtual=2)),
    "dp2_pp2": (4, dict(pipeline=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_x4_overlap_changes_neither_updates_nor_what_is_read_after_them(
    layout, ranks, models, tmp_path
):
    plain = learned(ranks, models, tmp_path, layout, {})
    align = {"align_param_gather": layout == "vpp2"}  # in interleaved schedules only
    overlapped = learned(ranks, models, tmp_path, layout, OVERLAP | align)
    assert_equal(plain, overlapped)
    assert max(plain[0]["buckets"]) == 1 < max(overlapped[0]["buckets"])


def learned(ranks, models, tmp_path, layout: str, megatron: dict) -> list[dict]:
    folder, _ = models("qwen3_moe_dense_layer")
    world, parallel = LAYOUTS[layout]
    return ranks(world).run(
        cases.learn_and_read,
        folder=folder,
        layout=parallel,
        # A large epsilon keeps Adam smooth where a gradient is almost 0.
        settings={"policy.megatron": megatron, "optimizer.eps": 1e-4},
        root=tmp_path / ("with" if megatron else "without"),
    )


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


def test_settings_reach_each_of_megatrons_configs(ranks, models, tmp_path):
    folder, _ = models("qwen3_moe")
    given = {
        "moe_router_dtype": "fp64",
        "overlap_grad_reduce": True,
        "bucket_size": 30_000,
        "decoupled_lr": 5e-4,
        "config_logger_dir": str(tmp_path),  # a field of two
    }
    settings = {"policy.megatron": given, "optimizer.lr": 1e-3}
    (found,) = ranks(1).run(cases.megatrons_settings, folder=folder, layout={}, settings=settings)
    assert found["TransformerConfig"]["moe_router_dtype"] == "fp64"
    assert found["TransformerConfig"]["config_logger_dir"] == str(tmp_path)
    assert found["OptimizerConfig"]["config_logger_dir"] == str(tmp_path)
    assert found["DistributedDataParallelConfig"]["overlap_grad_reduce"]
    assert found["DistributedDataParallelConfig"]["bucket_size"] == 30_000
    # Of the embedding and the output layer, and of all others.
    assert found["rates"] == pytest.approx([5e-4, 1e-3])
