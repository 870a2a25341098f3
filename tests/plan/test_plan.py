"""X8: what the planner says, against what runs on CPU hold, against Megatron-LM's formula, and as people see it."""

import json

import pytest
import yaml

from megastep import cli
from megastep.architecture import parse_architecture, read_architecture
from megastep.config import Config, ParallelConfig
from megastep.plan.activations import Layer
from megastep.plan.planning import GIB, in_flight, make_plan, stage_memory
from megastep.plan.shares import shares
from megastep.plan.suggest import suggest, uneven
from tests import cases

TOKENS = 1024
SHAPE = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=768,
             max_position_embeddings=2048)
EXPERTS = dict(moe_intermediate_size=192, num_experts=16, num_experts_per_tok=4)
SHAPES = {"qwen3_yarn": SHAPE, "qwen2_tied": SHAPE | {"vocab_size": 2000, "head_dim": 32},
          "qwen3_moe": SHAPE | EXPERTS | {"vocab_size": 6000}}

RUNS = [
    # model, ranks, layout, precision, recompute, micro-batches
    ("qwen3_yarn", 2, {}, "fp32", [], 1),
    ("qwen3_yarn", 2, dict(tensor=2), "bf16", [], 1),
    ("qwen3_yarn", 2, dict(pipeline=2), "fp32", [], 3),
    ("qwen3_yarn", 2, {}, "fp32", ["full"], 1),
    ("qwen3_yarn", 2, {}, "fp32", ["mlp"], 1),
    ("qwen2_tied", 2, dict(pipeline=2), "fp32", [], 2),
    ("qwen3_moe", 2, {}, "bf16", [], 1),
    ("qwen3_moe", 2, dict(expert=2), "fp32", [], 1),
    ("qwen3_moe", 2, dict(expert=2), "fp32", ["core_attn", "moe"], 1),
    ("qwen3_moe", 2, {}, "fp32", ["full"], 1),
    ("qwen3_moe", 2, dict(tensor=2), "fp32", [], 1),
    ("qwen3_moe", 4, dict(tensor=2, pipeline=2), "bf16", [], 2),
]


@pytest.mark.parametrize("model, world, layout, precision, recompute, micro_batches", RUNS)
def test_x8_estimates_are_what_a_run_holds(model, world, layout, precision, recompute, micro_batches, ranks, models):
    """Weights, gradients and optimizer exactly, activations within 15%."""
    folder, _ = models(model, **SHAPES[model])
    config = Config()
    config.model.path = str(folder)
    config.policy.ranks, config.policy.precision, config.policy.recompute = world, precision, recompute
    config.policy.parallel = ParallelConfig(**layout)
    config.train.micro_batch_tokens = TOKENS
    arch = read_architecture(folder)
    settings = {"policy.precision": precision, "policy.recompute": recompute}
    found = ranks(world).run(cases.memory_of_update, folder=folder, layout=layout, settings=settings, tokens=TOKENS,
                             micro_batches=micro_batches)
    per_stage = world // config.policy.parallel.pipeline
    for number, share in enumerate(shares(config, arch)):
        of_ranks = found[number * per_stage : (number + 1) * per_stage]
        expected = dict(weights=share.weights, gradients=share.gradients, optimizer=share.optimizer)
        assert {key: max(rank[key] for rank in of_ranks) for key in expected} == expected
        stage = stage_memory(config, arch, number, share, micro_batches, cuda=False)
        measured = max(rank["activations"] for rank in of_ranks)
        assert stage.activations == pytest.approx(measured, rel=0.15), stage


# ---------------------------------------------------------------- Megatron-LM's formula


def plain(**changes):
    """A dense model without grouped queries, whose gated layer has as many weights as 4 h without gate."""
    shape = dict(model_type="llama", hidden_size=6144, num_hidden_layers=32, num_attention_heads=48,
                 num_key_value_heads=48, intermediate_size=6144 * 8 // 3, vocab_size=32000,
                 max_position_embeddings=4096)
    return parse_architecture(shape | changes)


@pytest.mark.parametrize("tensor", [1, 8])
def test_x8_a_dense_layer_keeps_what_the_published_formula_says(tensor):
    """34 s b h bytes per layer (Korthikanti et al., eq. 2, without the scores that flash attention does not keep), of
    which 2 are masks of dropout. Theirs has no rotary embedding: no rotated copies, no cos and sin."""
    arch = plain()
    layer = Layer(arch, ParallelConfig(tensor=tensor), number=0, size=2)
    rotary = layer.parts["rope"] + layer.parts["attention"]
    ours = sum(layer.parts.values()) - rotary - layer.parts["log-sum-exp"]
    assert ours == pytest.approx((34 - 2) * arch.hidden / tensor, rel=1e-3)


@pytest.mark.parametrize("ranks", [8, 16])
def test_x8_a_rank_holds_what_the_published_formula_says(ranks, tmp_path):
    """Megatron-LM's estimate: 6 + 12 / data-parallel size bytes per parameter, with the distributed optimizer."""
    config = Config()
    config.model.path = str(write_model(tmp_path, plain().hf))
    config.policy.ranks, config.policy.precision = ranks, "bf16"
    config.policy.parallel = ParallelConfig(tensor=4)
    (share,) = shares(config, plain())
    held = share.weights + share.gradients + share.optimizer
    assert held == pytest.approx((6 + 12 / (ranks / 4)) * share.parameters, rel=1e-5)


def write_model(folder, hf: dict):
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def test_x8_micro_batches_in_flight_are_those_of_megatrons_schedules():
    assert [in_flight(4, 1, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(4, 1, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    # Interleaved with two chunks: 2 × 3 + 4 + 1 = 11 chunks on the first stage.
    assert [in_flight(4, 2, stage, 8) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]


# ---------------------------------------------------------------- the whole plan


def big(tmp_path, **changes) -> Config:
    config = Config()
    config.model.path = "configs/models/qwen3-30b-a3b"
    config.policy.ranks, config.policy.precision = 16, "bf16"
    config.policy.parallel = ParallelConfig(pipeline=2, expert=8)
    config.engine.tensor, config.engine.count, config.engine.max_model_len = 2, 8, 16384
    config.rollout.max_response_tokens = 4096
    config.cluster.colocate = True
    return config


def test_x8_counts_of_a_batch(tmp_path):
    config = big(tmp_path)
    config.rollout.prompts, config.rollout.samples = 64, 8
    plan = make_plan(config, trajectory_tokens=10_000)
    assert plan.parameters == 30_532_122_624  # as Hugging Face counts Qwen3-30B-A3B
    assert plan.sync_bytes == 2 * plan.parameters
    assert plan.micro_batches == -(-64 * 8 * 10_000 // (8 * 16384))
    assert plan.bubble == 1 / (plan.micro_batches + 1)
    assert plan.route_bytes == 64 * 8 * 10_000 * 48 * 8
    assert plan.engine.kv_per_token == 2 * 48 * 2 * 128 * 2


def test_x8_what_does_not_fit_is_told_with_its_cause_and_a_way_out(tmp_path):
    plan = make_plan(big(tmp_path))
    worst, *_ = plan.troubles()
    assert worst.startswith("training on stage 1: most of it is activations")
    change, fitting = suggest(plan.config, 79.6, None)
    assert change == {"policy.recompute": ["full"]}
    assert not fitting.troubles() and fitting.left > 0
    assert plan.config.policy.recompute == []  # what was asked for stays as it was


def test_x8_more_gpus_are_suggested_only_where_nothing_else_helps(tmp_path):
    config = big(tmp_path)
    config.model.path = "configs/models/qwen3-32b"
    config.policy.ranks, config.policy.parallel = 2, ParallelConfig()
    config.engine.count, config.engine.tensor = 1, 2
    config.cluster.colocate = False
    change, fitting = suggest(config, 79.6, None)
    assert change["policy.ranks"] > 2 and not fitting.troubles()


def test_x8_uneven_stages_have_fewer_layers_at_the_ends():
    assert uneven(94, 8) == [11, 12, 12, 12, 12, 12, 12, 11]
    assert uneven(48, 5) == [9, 10, 10, 10, 9] and uneven(7, 2) == [3, 4]


@pytest.mark.parametrize("change, trouble", [
    (("engine.gpu_memory", 0.95), "rollout on stage"),
    (("engine.tensor", 1), "engine: keys and values of one call"),
    (("optimizer.offload_fraction", 1.0), None),
])
def test_x8_rollout_and_engine_have_to_fit_too(change, trouble, tmp_path):
    config = big(tmp_path)
    config.policy.recompute = ["full"]
    before = make_plan(config)
    assert not before.troubles()
    section, name = change[0].split(".")
    setattr(getattr(config, section), name, change[1])
    after = make_plan(config, 79.6)
    if trouble:
        assert any(line.startswith(trouble) for line in after.troubles()), after.troubles()
    else:
        assert before.stages[0].policy - after.stages[0].policy == before.stages[0].share.optimizer
        assert after.stages[0].host == before.stages[0].host  # it waits there between updates in any case


def test_x8_a_kl_counts_the_weights_twice(tmp_path):
    config = big(tmp_path)
    config.policy.recompute = ["full"]
    config.loss.kl = 0.01
    stage = make_plan(config).stages[0]
    assert stage.activations >= stage.share.weights and stage.host >= stage.share.weights + stage.share.optimizer


# ---------------------------------------------------------------- the command


def test_x8_the_command_says_fits_by_its_exit_code(tmp_path, capsys):
    def plan(*arguments) -> tuple[int, str]:
        return cli.main(["plan", *arguments]), capsys.readouterr().out

    code, shown = plan("configs/local.yaml")
    assert code == 0 and "\nfits: the fullest GPU has" in shown
    assert "stage 1" in shown and "2 layers + embedding + head" in shown
    path = tmp_path / "big.yaml"
    path.write_text(yaml.safe_dump({
        "model": {"path": "configs/models/qwen3-30b-a3b"}, "engine": {"max_model_len": 16384},
        "policy": {"ranks": 8, "precision": "bf16", "parallel": {"expert": 8}}, "train": {"micro_batch_tokens": 16384},
    }))
    code, shown = plan(str(path), "--suggest")
    assert code == 1 and "\ndoes not fit:\n  training on stage 1" in shown
    settings = shown.split("\nfits with: ")[1].splitlines()[0].split()
    code, shown = plan(str(path), *settings)
    assert code == 0, shown


def test_x8_what_needs_a_gpu_can_be_planned_without_one(capsys):
    settings = ["policy.parallel.context=2", "samples.layout=merge", "policy.recompute=[moe_act]", "policy.ranks=2",
                "policy.parallel.expert=1"]
    assert cli.main(["plan", "configs/local.yaml", *settings]) == 0
    assert cli.main(["plan", "configs/local.yaml", "policy.parallel.tensor=3"]) == 2
    assert "error: policy.parallel.tensor = 3: does not divide" in capsys.readouterr().err


def test_x8_the_column_of_a_stage_adds_up(tmp_path):
    plan = make_plan(big(tmp_path))
    for stage in plan.stages:
        parts = stage.share.weights + stage.share.gradients + stage.optimizer + stage.activations
        assert plan.training(stage) == parts + 7 * GIB
