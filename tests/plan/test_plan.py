"""X8: the planner against measured runs on CPU, Megatron-LM's formula, and its printed output."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from megastep import cli
from megastep.config import Config, ParallelConfig, load
from megastep.models.architecture import parse_architecture, read_architecture
from megastep.plan import table
from megastep.plan.activations import Layer
from megastep.plan.model_states import model_states
from megastep.plan.planning import (
    GIB,
    dispatcher_bytes,
    in_flight,
    make_plan,
    micro_batches_per_rank,
    stage_memory,
)
from megastep.plan.suggest import _layers_per_stage, suggest, uneven
from megastep.plan.table import text
from megastep.samples import lay_out
from megastep.types import Sample
from tests import cases
from tests.samples.rollouts import step

TOKENS = 1024
SHAPE = dict(
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=768,
    max_position_embeddings=2048,
)
EXPERTS = dict(moe_intermediate_size=192, num_experts=16, num_experts_per_tok=4)
SHAPES = {
    "qwen3_yarn": SHAPE,
    "qwen2_tied": SHAPE | {"vocab_size": 2000, "head_dim": 32},
    "qwen3_moe": SHAPE | EXPERTS | {"vocab_size": 6000},
}

RUNS = [
    # model, ranks, layout, precision, recompute, micro-batches
    ("qwen3_yarn", 2, {}, "fp32", [], 1),
    ("qwen3_yarn", 2, dict(tensor=2), "bf16", [], 1),
    ("qwen3_yarn", 2, dict(pipeline=2, virtual=2), "fp32", [], 4),
    ("qwen3_yarn", 2, {}, "fp32", ["full"], 1),
    ("qwen3_yarn", 2, {}, "fp32", ["mlp"], 1),
    ("qwen2_tied", 2, dict(pipeline=2), "fp32", [], 3),
    ("qwen3_moe", 2, {}, "bf16", [], 1),
    ("qwen3_moe", 2, dict(expert=2), "fp32", ["core_attn", "moe"], 1),
    ("qwen3_moe", 2, {}, "fp32", ["full"], 1),
    ("qwen3_moe", 2, dict(tensor=2), "fp32", [], 1),
    ("qwen3_moe", 4, dict(tensor=2, pipeline=2), "bf16", [], 2),
    ("qwen3_moe", 4, dict(expert=2), "fp32", [], 1),  # two ranks hold the same experts
]


@pytest.mark.parametrize("model, world, layout, precision, recompute, micro_batches", RUNS)
def test_x8_estimates_match_a_run(
    model, world, layout, precision, recompute, micro_batches, ranks, models
):
    """Weights, gradients and optimizer exactly, activations within 15%."""
    folder, _ = models(model, **SHAPES[model])
    config = Config()
    config.model.path = str(folder)
    config.policy.ranks = world
    config.policy.precision = precision
    config.policy.recompute = recompute
    config.policy.parallel = ParallelConfig(**layout)
    config.train.micro_batch_tokens = TOKENS
    arch = read_architecture(folder)
    settings = {"policy.precision": precision, "policy.recompute": recompute}
    found = ranks(world).run(
        cases.memory_of_update,
        folder=folder,
        layout=layout,
        settings=settings,
        tokens=TOKENS,
        micro_batches=micro_batches,
    )
    per_stage = world // config.policy.parallel.pipeline
    for number, states in enumerate(model_states(config, arch)):
        of_ranks = found[number * per_stage : (number + 1) * per_stage]
        expected = dict(
            weights=states.weights, gradients=states.gradients, optimizer=states.optimizer
        )
        assert {key: max(rank[key] for rank in of_ranks) for key in expected} == expected
        stage = stage_memory(config, arch, number, states, micro_batches, cuda=False)
        measured = max(rank["activations"] for rank in of_ranks)
        assert stage.activations == pytest.approx(measured, rel=0.15), stage


@pytest.mark.parametrize("layout", [{}, dict(expert=2)], ids=["dp2", "ep2"])
def test_x8_buckets_of_overlapped_communication_match_a_run(layout, ranks, models):
    folder, _ = models("qwen3_moe")
    config = Config()
    config.model.path = str(folder)
    config.policy.ranks = 2
    config.policy.parallel = ParallelConfig(**layout)
    config.policy.megatron = {"overlap_grad_reduce": True, "bucket_size": 30_000}
    config.policy.megatron["pad_buckets_for_high_nccl_busbw"] = True
    found = ranks(2).run(
        cases.memory_of_update,
        folder=folder,
        layout=layout,
        settings={"policy.megatron": config.policy.megatron},
        tokens=64,
        micro_batches=1,
    )
    (states,) = model_states(config, read_architecture(folder))
    expected = dict(weights=states.weights, gradients=states.gradients, optimizer=states.optimizer)
    assert {key: max(rank[key] for rank in found) for key in expected} == expected
    config.policy.megatron = {}
    (whole,) = model_states(config, read_architecture(folder))
    assert whole.weights < states.weights  # every bucket is padded


# ---------------------------------------------------------------- Megatron-LM's formula


def plain(**changes):
    """A dense model without grouped queries; its gated MLP has as many weights as a 4 h MLP."""
    shape = dict(
        model_type="llama",
        hidden_size=6144,
        num_hidden_layers=32,
        num_attention_heads=48,
        num_key_value_heads=48,
        intermediate_size=6144 * 8 // 3,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    return parse_architecture(shape | changes)


@pytest.mark.parametrize("tensor", [1, 8])
def test_x8_a_dense_layer_matches_the_published_formula(tensor):
    """34 s b h bytes per layer: Korthikanti et al., eq. 2, without the scores of attention.

    Flash attention does not keep them. 2 of the 34 are dropout masks. The formula has no rotary
    embedding: no rotated copies, no cos and sin.
    """
    arch = plain()
    layer = Layer(arch, ParallelConfig(tensor=tensor), number=0, itemsize=2)
    rotary = layer.parts["rope"] + layer.parts["attention"]
    ours = sum(layer.parts.values()) - rotary - layer.parts["log-sum-exp"]
    assert ours == pytest.approx((34 - 2) * arch.hidden / tensor, rel=1e-3)


@pytest.mark.parametrize("ranks", [8, 16])
def test_x8_model_states_match_the_published_formula(ranks, tmp_path):
    """Megatron-LM, distributed optimizer: 6 + 12 / data-parallel size bytes per parameter."""
    config = Config()
    config.model.path = str(write_model(tmp_path, plain().hf))
    config.policy.ranks = ranks
    config.policy.precision = "bf16"
    config.policy.parallel = ParallelConfig(tensor=4)
    (states,) = model_states(config, plain())
    total = states.weights + states.gradients + states.optimizer
    assert total == pytest.approx((6 + 12 / (ranks / 4)) * states.parameters, rel=1e-5)


def write_model(folder, hf: dict):
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def test_x8_micro_batches_in_flight_match_megatrons_schedules():
    assert [in_flight(4, 1, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(4, 1, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    # Interleaved with two chunks: 2 × 3 + 4 + 1 = 11 chunks on the first stage.
    assert [in_flight(4, 2, stage, 8) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]


# ---------------------------------------------------------------- the whole plan


def big() -> Config:
    config = Config()
    config.model.path = "configs/models/qwen3-30b-a3b"
    config.policy.ranks = 16
    config.policy.precision = "bf16"
    config.policy.parallel = ParallelConfig(pipeline=2, expert=8)
    config.engine.num_engines = 8
    config.engine.tensor_parallel = 2
    config.engine.max_model_len = 16384
    config.rollout.max_response_tokens = 4096
    config.cluster.colocate = True
    return config


def test_x8_counts_of_a_batch():
    config = big()
    config.rollout.prompts = 64
    config.rollout.samples_per_prompt = 8
    plan = make_plan(config, trajectory_tokens=10_000)
    assert plan.parameters == 30_532_122_624  # as Hugging Face counts Qwen3-30B-A3B
    assert plan.sync_bytes == 2 * plan.parameters
    # A micro-batch of 16384 tokens holds one whole trajectory; 8 data-parallel ranks.
    assert plan.micro_batches == 64 * 8 // 8
    assert plan.bubble == 1 / (plan.micro_batches + 1)
    assert plan.routing_bytes == 64 * 8 * 10_000 * 48 * 8
    assert plan.engine.kv_per_token == 2 * 48 * 2 * 128 * 2


def test_x8_a_plan_that_does_not_fit_reports_cause_and_suggestion():
    plan = make_plan(big())
    worst, *_ = plan.problems()
    assert worst.startswith("training on stage 1: mostly activations, ")
    change, fitting = suggest(plan.config, 79.6, None)
    assert change == {"policy.recompute": ["full"]}
    assert not fitting.problems() and fitting.free_bytes > 0
    assert plan.config.policy.recompute == []  # the given config is not modified


def test_x8_more_gpus_are_suggested_only_where_nothing_else_helps():
    config = big()
    config.model.path = "configs/models/qwen3-32b"
    config.policy.ranks = 2
    config.policy.parallel = ParallelConfig()
    config.engine.num_engines = 1
    config.engine.tensor_parallel = 2
    config.cluster.colocate = False
    change, fitting = suggest(config, 79.6, None)
    assert change["policy.ranks"] > 2 and not fitting.problems()


def test_x8_the_given_sizes_are_among_the_candidates():
    config = big()
    config.policy.ranks = 24
    config.policy.parallel.pipeline = 3
    change, _ = suggest(config, 79.6, None)
    assert change == {"policy.recompute": ["full"]}


def test_x8_engines_that_do_not_fit_get_more_gpus_each():
    config = load(
        "configs/h100/qwen3-32b.yaml",
        ["engine.tensor_parallel=1", "engine.num_engines=8"],
        has_cuda=True,
    )
    change, fitting = suggest(config, 79.6, None)
    assert change == {"engine.tensor_parallel": 2, "engine.num_engines": 4}
    assert not fitting.problems()


def test_x8_uneven_stages_have_fewer_layers_at_the_ends():
    assert uneven(94, 8) == [11, 12, 12, 12, 12, 12, 12, 11]
    assert uneven(48, 5) == [9, 10, 10, 10, 9] and uneven(7, 2) == [3, 4]


def test_x8_virtual_stages_are_split_too():
    config = big()
    config.policy.parallel.virtual = 2
    layers = _layers_per_stage(config, plain(num_hidden_layers=94), pipeline=4)
    assert layers == [11, 12, 12, 12, 12, 12, 12, 11]


@pytest.mark.parametrize(
    "change, problem",
    [
        (("engine.gpu_memory_utilization", 0.95), "rollout on stage"),
        (("engine.tensor_parallel", 1), "engine: no room for the KV cache of one call"),
        (("optimizer.cpu_offload_fraction", 1.0), None),
    ],
)
def test_x8_rollout_and_engine_must_fit_too(change, problem):
    config = big()
    config.policy.recompute = ["full"]
    before = make_plan(config)
    assert not before.problems()
    section, name = change[0].split(".")
    setattr(getattr(config, section), name, change[1])
    after = make_plan(config, 79.6)
    if problem:
        assert any(line.startswith(problem) for line in after.problems()), after.problems()
    else:
        assert before.stages[0].policy - after.stages[0].policy == before.stages[0].states.optimizer
        # Colocated, the states are in CPU memory during rollouts anyway: only gradients are added.
        assert after.stages[0].host == before.stages[0].host * 16 // 12


def test_x8_half_an_optimizer_stays_on_the_gpu_during_rollouts():
    """Megatron's hybrid optimizer cannot offload its GPU part; a whole optimizer is offloaded."""
    config = big()
    whole = make_plan(config)
    config.optimizer.cpu_offload_fraction = 0.5
    half = make_plan(config)
    stage = whole.stages[0]
    more = half.rollout_bytes(half.stages[0]) - whole.rollout_bytes(stage)
    assert more == stage.states.optimizer // 2
    assert half.stages[0].host == stage.states.optimizer_parameters * 16 // 2


def test_x8_offloaded_activations_are_in_cpu_memory():
    config = big()
    config.policy.parallel = ParallelConfig(expert=8)
    (before,) = make_plan(config).stages
    config.policy.activation_offload_layers = 12
    (after,) = make_plan(config).stages
    assert before.kept - after.kept == pytest.approx(before.kept / 4)
    assert after.host - before.host == pytest.approx(before.kept - after.kept, abs=1)


@pytest.mark.parametrize(
    "samples, tokens", [(8, 5), (8, 6), (4, 5), (3, 2), (8, 2), (5, 16), (1, 3)]
)
@pytest.mark.parametrize("ranks, virtual", [(1, 1), (3, 1), (2, 2)])
def test_x8_micro_batches_are_counted_as_they_are_packed(samples, tokens, ranks, virtual):
    """Trajectories of one length without shared prefixes, against the packing."""
    config = big()
    config.rollout.prompts = 7
    config.rollout.samples_per_prompt = samples
    config.train.micro_batch_tokens = 16
    config.policy.ranks = 2 * ranks
    config.policy.parallel = ParallelConfig(pipeline=2, virtual=virtual)
    batch = []
    for group in range(7):
        for trajectory in range(samples):
            row = np.full(tokens + 1, len(batch), np.int32)
            sample_step = step(0, row[:1], row[1:])
            batch.append(Sample(sample_step, group, trajectory, advantage=1.0, weight=1e-3))
    packed, _ = lay_out(
        batch, ranks, budget_tokens=16, pack_layout="trie", rounds_of=2 if virtual > 1 else 1
    )
    assert micro_batches_per_rank(config, tokens) == len(packed[0])


def test_x8_a_kl_counts_the_weights_twice():
    config = big()
    config.policy.recompute = ["full"]
    config.loss.kl_coef = 0.01
    stage = make_plan(config).stages[0]
    assert stage.activations >= stage.states.weights
    assert stage.host >= stage.states.weights + stage.states.optimizer


# ---------------------------------------------------------------- Megatron's own settings


def with_settings(**policy) -> Config:
    config = big()
    config.policy.recompute = ["full"]
    for name, value in policy.items():
        setattr(config.policy, name, value)
    return config


@pytest.mark.parametrize("recipe, bytes_each", [("blockwise", 2), ("mxfp8", 2 * 33 / 32)])
def test_x8_fp8_keeps_copies_of_every_matrix(recipe, bytes_each):
    plain = make_plan(with_settings()).stages[0]
    fp8 = make_plan(with_settings(fp8=recipe)).stages[0]
    # Of Qwen3-30B-A3B: 24 layers with queries and output of 32 heads, keys and values of 4, and 16
    # of 128 experts.
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    experts = 16 * 3 * 2048 * 768
    assert fp8.fp8_copies == pytest.approx(24 * (attention + experts) * bytes_each)
    assert fp8.policy - plain.policy == fp8.fp8_copies
    uncached = with_settings(fp8=recipe, megatron={"disable_parameter_transpose_cache": True})
    assert make_plan(uncached).stages[0].policy == plain.policy


def test_x8_fp8_copies_stay_while_a_colocated_engine_works():
    plain = make_plan(with_settings())
    fp8 = make_plan(with_settings(fp8="blockwise"))
    more = fp8.rollout_bytes(fp8.stages[0]) - plain.rollout_bytes(plain.stages[0])
    assert more == fp8.stages[0].fp8_copies > 0


def test_x8_fused_gradients_need_a_placeholder_per_shape_and_no_copy():
    fused = make_plan(with_settings()).stages[0]
    unfused = make_plan(with_settings(megatron={"gradient_accumulation_fusion": False})).stages[0]
    shapes = [(5120, 2048), (2048, 4096), (1536, 2048), (2048, 768)]  # qkv, output, gate up, down
    assert unfused.placeholders == 0
    assert fused.placeholders == 2 * sum(a * b for a, b in shapes)
    assert unfused.layer_peak - fused.layer_peak == unfused.states.largest_weight


def test_x8_deepeps_buffers_depend_on_the_ranks_that_share_experts():
    def buffers(expert: int, **megatron) -> int:
        config = with_settings(megatron=megatron)
        config.policy.parallel = ParallelConfig(expert=expert)
        return dispatcher_bytes(config, read_architecture(config.model.path))

    token = 2048 * 2 + 16 + 128 * 16
    assert buffers(8) == 10 * 8 * 256 * token
    assert buffers(4) == buffers(8) // 2
    assert buffers(8, moe_deepep_num_sms=24) == buffers(8) // 20 * 24
    assert buffers(16) > 2 * buffers(8)  # two nodes: NVLink and RDMA
    assert buffers(1) == buffers(8, moe_token_dispatcher_type="alltoall") == 0


def test_x8_a_quantized_engine_has_room_for_more_keys():
    config = big()
    plain = make_plan(config).engine
    config.engine.quantization = "fp8"
    quantized = make_plan(config).engine
    outside = 2 * 151936 * 2048  # embedding and head stay in bf16
    assert quantized.weights == (30_532_122_624 - outside + 2 * outside) // 2
    assert quantized.kv_cache - plain.kv_cache == plain.weights - quantized.weights


def test_x8_settings_with_unknown_memory_are_named():
    config = with_settings(megatron={"batch_p2p_sync": False, "bucket_size": 10**8}, fp8="mxfp8")
    shown = text(make_plan(config))
    assert "policy.megatron: memory not counted: batch_p2p_sync\n" in shown
    assert "bf16 with FP8 (mxfp8)" in shown and "FP8 copies of weights" in shown


# ---------------------------------------------------------------- the command


def test_x8_the_exit_code_reports_whether_it_fits(tmp_path, capsys):
    def plan(*arguments) -> tuple[int, str]:
        return cli.main(["plan", *arguments]), capsys.readouterr().out

    code, shown = plan("configs/local.yaml")
    assert code == 0 and "\nfits: the policy's fullest GPU has" in shown
    assert "stage 1" in shown and "2 layers + embedding + head" in shown
    path = tmp_path / "big.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"path": str(Path("configs/models/qwen3-30b-a3b").resolve())},
                "engine": {"max_model_len": 16384},
                "policy": {"ranks": 8, "precision": "bf16", "parallel": {"expert": 8}},
                "train": {"micro_batch_tokens": 16384},
            }
        )
    )
    code, shown = plan(str(path), "--suggest")
    assert code == 1 and "\ndoes not fit:\n  training on stage 1" in shown
    settings = shown.split("\nfits with: ")[1].splitlines()[0].split()
    code, shown = plan(str(path), *settings)
    assert code == 0, shown


@pytest.mark.parametrize(
    "layers, pipeline, split, change",
    [
        (7, 1, None, "policy.parallel.pipeline=2 policy.parallel.layers_per_stage=[3,4]"),
        (8, 2, [3, 5], "policy.parallel.pipeline=4 policy.parallel.layers_per_stage=null"),
    ],
)
def test_x8_a_suggestion_is_a_valid_command_line(layers, pipeline, split, change, tmp_path, capsys):
    # Tensor parallelism cannot split 15 heads with 3 key heads.
    shape = plain(
        hidden_size=1920,
        num_hidden_layers=layers,
        num_attention_heads=15,
        num_key_value_heads=3,
        head_dim=128,
        intermediate_size=5632,
    )
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"path": str(write_model(tmp_path, shape.hf))},
                "engine": {"max_model_len": 512, "gpu_memory_utilization": 0.9},
                "optimizer": {"cpu_offload_fraction": 1.0},
                "train": {"micro_batch_tokens": 512},
                "policy": {
                    "ranks": 4,
                    "precision": "bf16",
                    "recompute": ["full"],
                    "parallel": {"pipeline": pipeline, "layers_per_stage": split},
                },
            }
        )
    )
    gpu = "--gpu-gib=8.0" if pipeline == 1 else "--gpu-gib=7.85"
    assert cli.main(["plan", str(path), gpu, "--suggest"]) == 1
    shown = capsys.readouterr().out
    assert f"\nfits with: {change}\n" in shown, shown
    assert cli.main(["plan", str(path), gpu, *change.split()]) == 0


@pytest.mark.parametrize(
    "argument",
    [
        "--gpu-gib=inf",
        "--gpu-gib=nan",
        "--gpu-gib=-5",
        "--gpu-gib=0",
        "--gpu-gib=much",
        "--trajectory-tokens=-100",
        "--trajectory-tokens=0",
        "--trajectory-tokens=1.5",
    ],
)
def test_x8_impossible_numbers_are_errors(argument, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "configs/local.yaml", argument])
    name, value = argument.split("=")
    assert ended.value.code == 2 and f"argument {name}: {value}: a " in capsys.readouterr().err


def test_x8_a_config_that_needs_gpus_is_planned_without_one(capsys):
    settings = [
        "policy.parallel.context=2",
        "train.pack_layout=merge",
        "policy.recompute=[moe_act]",
        "policy.ranks=2",
        "policy.parallel.expert=1",
    ]
    assert cli.main(["plan", "configs/local.yaml", *settings]) == 0
    assert cli.main(["plan", "configs/local.yaml", "policy.parallel.tensor=3"]) == 2
    assert "error: policy.parallel.tensor = 3: does not divide" in capsys.readouterr().err


def test_x8_the_column_of_a_stage_adds_up():
    plan = make_plan(big())
    for stage in plan.stages:
        model_states = stage.states.weights + stage.states.gradients + stage.optimizer
        constant = model_states + stage.extras + 7 * GIB
        assert plan.training_bytes(stage) == constant + stage.activations


@pytest.mark.parametrize(
    ("recipe", "largest"), [("qwen3-8b", 151936 * 4096 * 2), ("qwen3-32b", 151936 * 5120 * 2)]
)
def test_x8_the_buffer_of_a_weight_sync_holds_the_largest_tensor(recipe, largest):
    """An embedding; with a larger sync.bucket_mb the buffer has its size."""

    def plan(*given: str):
        return make_plan(load(f"configs/h100/{recipe}.yaml", list(given), has_cuda=True))

    small = plan("sync.bucket_mb=64")
    assert small.sync.buffer == small.sync.largest_tensor == largest
    text = table.text(small)
    assert "(sync.bucket_mb = 64, largest tensor 1." in text and ", buffers of 1." in text
    large = plan("sync.bucket_mb=4096")
    assert large.sync.buffer == 4 * GIB
    # Two buckets of gathered weights and the buffer.
    more = large.weight_sync_bytes(large.stages[0]) - small.weight_sync_bytes(small.stages[0])
    assert more == 3 * (4 * GIB - largest)


def test_x8_vllm_keeps_the_experts_of_a_layer_during_a_weight_sync():
    """Whole, and once more as the worker's shard; a KV cache in addition would not fit."""
    plan = make_plan(load("configs/h100/qwen3-235b-a22b.yaml", has_cuda=True))
    experts = 128 * 3 * 4096 * 1536 * 2
    assert plan.sync.engine == experts + experts // plan.config.engine.tensor_parallel
    fullest = max(plan.weight_sync_bytes(stage) for stage in plan.stages)
    assert fullest < plan.gpu_bytes < fullest + plan.engine.kv_cache


@pytest.mark.parametrize(
    ("recipe", "change", "problem"),
    [
        ("qwen3-8b", "sync.bucket_mb=20000", "weight sync on stage 1: buffers of 19.5 GiB and 2.3"),
        (
            "qwen3-235b-a22b-disaggregated",
            "engine.gpu_memory_utilization=0.97",
            "weight sync: engine.gpu_memory_utilization = 0.97 leaves no room for 7.4 GiB",
        ),
    ],
)
def test_x8_a_weight_sync_must_fit_too(recipe, change, problem):
    path = f"configs/h100/{recipe}.yaml"
    assert not make_plan(load(path, has_cuda=True)).problems()
    problems = make_plan(load(path, [change], has_cuda=True)).problems()
    assert any(line.startswith(problem) for line in problems), problems


def test_x8_the_bytes_of_each_rank_in_a_weight_sync():
    """Disaggregated ranks send their shares at the same time; colocated ones gather the model.
    tests/sync compares such numbers with counted ones."""
    plan = make_plan(load("configs/h100/qwen3-30b-a3b-disaggregated.yaml", has_cuda=True))
    traffic = plan.sync_traffic
    assert sum(traffic.sent) == traffic.by_worker == plan.sync_bytes
    assert traffic.gathered == [0] * 8 and max(traffic.sent) < 1.05 * plan.sync_bytes / 8
    # One adapter of 50 GB/s per rank, then NVLink of 450 GB/s among the workers of a node.
    least_s = plan.sync_bytes / (8 * 50e9) + plan.sync_bytes / 450e9
    assert least_s < traffic.seconds < 1.3 * least_s
    assert "  a rank sends at most 7.3 GiB and receives 0.0; 0.33 s" in table.text(plan)
    colocated = make_plan(load("configs/h100/qwen3-30b-a3b.yaml", has_cuda=True)).sync_traffic
    assert all(s + g == plan.sync_bytes for s, g in zip(colocated.sent, colocated.gathered))


def test_x8_a_teacher_counts_its_weights():
    recipe = "configs/h100/qwen3-8b.yaml"
    given = ["loss.type=distill", "loss.teacher=configs/models/qwen3-32b"]
    alone = make_plan(load(recipe, has_cuda=True))
    taught = make_plan(load(recipe, given, has_cuda=True))
    for before, after in zip(alone.stages, taught.stages, strict=True):
        assert after.policy - before.policy == after.teacher
        more = taught.rollout_bytes(after) - alone.rollout_bytes(before)
        assert more == after.teacher
    tensor = taught.config.policy.parallel.tensor
    parameters = sum(stage.teacher for stage in taught.stages) / 2 * tensor  # bf16
    assert parameters == pytest.approx(32.8e9, rel=0.01)
