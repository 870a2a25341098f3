"""D7: configuration errors are one line each: the key, the value and what is right."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megastep
from megastep import cli
from megastep.config import Config, ParallelConfig, load, paths, to_yaml, validate
from megastep.errors import ConfigError
from tests.bad_input.harness import rejected
from tests.fetched import shape_overrides

LOCAL = "configs/local.yaml"
TINY = Path("configs/models/tiny-qwen3-moe/config.json")


def problems(*overrides: str, config=LOCAL) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(config, list(overrides))
    return error.value.problems


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=str)
def test_shipped_configs_are_valid(path):
    load(path, shape_overrides(path))


def test_later_sources_override_earlier_ones(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(
        f"model: {{path: {TINY.parent.resolve()}, init: random}}\ntrain: {{steps: 7, seed: 3}}\n"
    )
    top = tmp_path / "top.yaml"
    top.write_text("base: base.yaml\ntrain: {steps: 8}\noptimizer: {lr: 1e-3}\n")
    config = load(top, ["train.seed=4", "optimizer.betas=[0.8,0.9]"])
    assert (config.train.steps, config.train.seed, config.model.init) == (8, 4, "random")
    assert config.optimizer.lr == 1e-3 and config.optimizer.betas == [0.8, 0.9]
    assert config.optimizer.eps == Config().optimizer.eps


def test_resolved_config_reads_back(tmp_path):
    config = load(
        LOCAL, ["train.steps=9", "policy.parallel.layers_per_stage=null", "async.max_staleness=0.5"]
    )
    assert config.asynchronous.max_staleness == 0.5 and "\nasync:\n" in to_yaml(config)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "config.yaml") == paths.absolute(config)


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize("path", ["local", "sql", "search", "h100/qwen3-8b-disaggregated"])
def test_configs_load_from_any_directory(path, tmp_path, monkeypatch):
    """Models and data too: paths in a file are relative to it."""
    shutil.copytree("configs", tmp_path / "configs")
    # A model that tools/get_model.py writes is not in a fresh checkout; its shape is.
    shutil.copytree("configs/models/smollm2-135m", tmp_path / "models" / "smollm2-135m")
    config = tmp_path / "configs" / f"{path}.yaml"
    here = load(config, has_cuda=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    there = load(config, has_cuda=True)
    assert there == here and Path(there.model.path).is_dir()
    by_relative_path = load(os.path.relpath(config), has_cuda=True)
    assert by_relative_path.model.path == os.path.relpath(here.model.path)


def test_policy_attention_suits_the_model_and_the_parallel_layout(tmp_path):
    """On a machine with a GPU."""

    def problems(attention: str, model="configs/models/qwen3-8b", context=1) -> list[str]:
        config = Config()
        config.model.path = str(model)
        config.policy.attention = attention
        config.policy.ranks = config.policy.parallel.context = context
        lines = validate(config, has_cuda=True)
        return [line for line in lines if line.startswith("policy.attention")]

    architecture = json.loads(Path("configs/models/qwen3-8b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**architecture, "head_dim": 256}))
    assert not problems("triton") and not problems("flex", tmp_path)
    (wide,) = problems("triton", tmp_path)
    assert "at most 128 dimensions, and the model's have 256; use flex, or auto" in wide
    (context,) = problems("flex", context=2)
    assert "context parallelism needs Transformer Engine's attention" in context
    assert not problems("auto", context=2)


def test_plan_works_from_any_directory(tmp_path, monkeypatch, capsys):
    config = Path(LOCAL).resolve()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", str(config)]) == 0
    assert f"{config.parent}/models/chase: qwen3_moe" in capsys.readouterr().out


def test_paths_are_relative_to_the_file_that_names_them(tmp_path, monkeypatch):
    """Those of the command line, and run.dir always, to the working directory."""
    above = tmp_path / "above"
    below = above / "below"
    for folder in (below / "model", above / "set"):
        folder.mkdir(parents=True)
    (below / "model" / "config.json").write_text(TINY.read_text())
    (below / "base.yaml").write_text(
        "model: {path: model, init: random}\ndata: {train: rows.jsonl, eval: hf:../set:test}\n"
        "env: {options: {databases: ../dbs, list: [./a, b, ..], name: x/y}}\n"
    )
    (above / "top.yaml").write_text("base: below/base.yaml\nrun: {resume: runs/a, dir: out}\n")
    monkeypatch.chdir(tmp_path)
    config = load("above/top.yaml")
    assert config.model.path == "above/below/model"
    assert (config.data.train, config.data.eval) == ("above/below/rows.jsonl", "hf:above/set:test")
    assert config.env.options == {
        "databases": f"{above}/dbs",
        "list": [f"{below}/a", "b", ".."],
        "name": "x/y",
    }
    assert (config.run.resume, config.run.dir) == ("above/runs/a", "out")
    given = load(
        "above/top.yaml",
        [
            "run.resume=auto",
            "data.train=x.parquet",
            "data.eval=hf:org/name",
            "env.options.databases=./dbs",
            "env.options.name=z",
        ],
    )
    assert given.run.resume == "auto"
    assert (given.data.train, given.data.eval) == ("x.parquet", "hf:org/name")
    assert given.env.options["databases"] == f"{tmp_path}/dbs" and given.env.options["name"] == "z"


def test_values_that_are_not_paths_are_unchanged(tmp_path):
    (tmp_path / "top.yaml").write_text(
        f"model: {{path: {TINY.parent.resolve()}, init: random}}\nrun: {{resume: never}}\n"
        "data: {train: generated, eval: 'hf:org/name:test'}\n"
    )
    config = load(tmp_path / "top.yaml")
    assert (config.model.path, config.run.resume) == (str(TINY.parent.resolve()), "never")
    assert (config.data.train, config.data.eval) == ("generated", "hf:org/name:test")


def test_symbolic_links_in_paths_are_followed(tmp_path):
    configs = tmp_path / "project" / "configs"
    model = tmp_path / "project" / "model"
    configs.mkdir(parents=True)
    model.mkdir()
    (model / "config.json").write_text(TINY.read_text())
    (configs / "top.yaml").write_text("model: {path: ../model, init: random}\n")
    (tmp_path / "link").symlink_to("project/configs")
    assert Path(load(tmp_path / "link" / "top.yaml").model.path).samefile(model)


def test_the_saved_config_loads_from_any_directory(tmp_path, monkeypatch):
    """Paths of the command line are absolute in it; other values are unchanged."""
    monkeypatch.setenv("KEY", "value")
    config = load(
        LOCAL,
        [
            "data.train=rows.jsonl",
            "run.resume=runs/x/checkpoints/step_1",
            "run.name=a b",
            "env.options={key: '${env:KEY}', odd: '???', number: '1e-3', deep: {1: [null, true]}}",
        ],
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    root = os.getcwd()
    monkeypatch.chdir(tmp_path)
    back = load("config.yaml")
    assert back.model.path == f"{root}/configs/models/chase"
    assert back.data.train == f"{root}/rows.jsonl"
    assert back.run.resume == f"{root}/runs/x/checkpoints/step_1" and back.run.dir == "runs"
    assert back.env.options == config.env.options
    assert back.env.options == {
        "key": "${env:KEY}",
        "odd": "???",
        "number": "1e-3",
        "deep": {1: [None, True]},
    }


@pytest.mark.parametrize("given", ["file", "command line"])
def test_a_hub_name_is_answered_with_the_download_command(given, tmp_path):
    path = tmp_path / "hub.yaml"
    if given == "file":
        path.write_text("model: {path: Qwen/Qwen3-8B}\n")
        (line,) = problems(config=path)
        assert line.startswith(f"model.path: {tmp_path}/Qwen/Qwen3-8B: no such")
    else:
        path.write_text("")
        (line,) = problems("model.path=Qwen/Qwen3-8B", config=path)
        assert line.startswith("model.path: Qwen/Qwen3-8B: no such")
    assert line.endswith(
        "`hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B`, then model.path=models/Qwen3-8B"
    )
    assert "hf download" not in problems("model.path=/models/Qwen3-8B")[0]


@pytest.mark.parametrize(
    "command", [["train"], ["eval"], ["rollout", "--out", "x.safetensors"]], ids=lambda c: c[0]
)
def test_env_name_is_required(command, tmp_path, capsys):
    """There is no default environment."""
    path = tmp_path / "model.yaml"
    path.write_text(
        f"model: {{path: {Path('configs/models/bytes').resolve()}, init: random}}\n"
        f"run: {{dir: {tmp_path}}}\nengine: {{max_model_len: 512}}\n"
    )
    assert cli.main([command[0], str(path), *command[1:]]) == 2
    names = "arithmetic, chase, guess, reasoning_gym, search, skyrl, sql, textarena"
    line = f"error: env.name: must be given; one of {names}, or module:Class\n"
    assert capsys.readouterr().err == line


def test_plan_needs_only_a_model(tmp_path, capsys):
    path = tmp_path / "model.yaml"
    path.write_text(f"model: {{path: {Path('configs/models/bytes').resolve()}}}\n")
    assert cli.main(["plan", str(path)]) == 0 and "fits: " in capsys.readouterr().out


# ---------------------------------------------------------------- values


def test_importance_sampling_follows_from_staleness():
    """S15: asynchronous training truncates importance ratios by default (TIS)."""

    def mode(*given: str) -> str:
        return load(LOCAL, list(given)).policy_loss.importance_sampling.mode

    assert mode() == "none"
    assert mode("async.max_staleness=1") == "truncate"
    assert mode("async.max_staleness=1", "loss.importance_sampling.mode=mask") == "mask"
    (line,) = problems("async.max_staleness=1", "loss.type=reinforce", "loss.old_logprobs=rollout")
    assert line.startswith(
        "async.max_staleness = 1.0: loss.type = reinforce has no ratio that would correct"
    )


def test_colocated_engines_cannot_be_asynchronous():
    (line,) = problems("async.max_staleness=0.5", "cluster.colocate=true")
    assert line.startswith(
        "async.max_staleness = 0.5: colocated engines cannot generate while the policy trains"
    )


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "policy.parallel.tenser=2",
            "policy.parallel.tenser: unknown key; did you mean policy.parallel.tensor?",
        ),
        ("lr=1", "lr: unknown key; did you mean optimizer.lr?"),
        (
            "qwertz=1",
            "qwertz: unknown key; known sections: model, data, env, agent, rollout, eval, policy",
        ),
        ("policy.parallel=2", "policy.parallel: is a section"),
        ("train.steps=many", "train.steps = 'many': wrong type, int is needed"),
        ("train.steps=1.5", "train.steps = 1.5: wrong type, int is needed"),
        (
            "checkpoint.asynchronous=perhaps",
            "checkpoint.asynchronous = 'perhaps': wrong type, bool is needed",
        ),
        ("train.steps", "train.steps: not of the form key=value"),
        ("policy.precision=fp8", "policy.precision = fp8: must be one of fp32, bf16"),
        ("policy.attention=sdpa", "policy.attention = sdpa: must be one of auto, flex, triton"),
        (
            "policy.attention=triton",
            "policy.attention = triton: chooses a kernel for CUDA, and there is no GPU here",
        ),
        ("train.steps=0", "train.steps = 0: must be 1 or more"),
        ("optimizer.lr=-1", "optimizer.lr = -1.0: must not be negative"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: must be two numbers of [0, 1)"),
        ("train.steps=2", "optimizer.warmup_steps = 5: must be less than the 4 optimizer steps"),
        ("async.on_stale=forget", "async.on_stale = forget: must be one of wait, drop"),
        ("async.max_staleness=-1", "async.max_staleness = -1.0: must not be negative"),
        ("async.max_stale=1", "async.max_stale: unknown key; did you mean async.max_staleness?"),
        ("train.mini_batch_prompts=0", "train.mini_batch_prompts = 0: must be 1 or more"),
        ("advantage.gamma=2", "advantage.gamma = 2.0: must lie in 0 to 1"),
        ("warm_start.trajectories=-1", "warm_start.trajectories = -1: must not be negative"),
        (
            "policy.parallel.tensor=3",
            "policy.parallel.tensor = 3: does not divide the model's 4 attention heads",
        ),
        (
            "policy.parallel.tensor=4",
            "policy.parallel.tensor = 4: does not divide the model's 2 key/value heads",
        ),
        (
            "policy.parallel.expert=3",
            "policy.parallel.expert = 3: does not divide the model's 8 experts; 1, 2, 4, 8",
        ),
        (
            "policy.parallel.pipeline=4",
            "policy.parallel.pipeline = 4: pipeline × virtual = 4 does not divide",
        ),
        ("policy.parallel.layers_per_stage=[3]", "adds up to 3, the model has 2 layers"),
        (
            "policy.parallel.virtual=2",
            "policy.parallel.virtual = 2: needs policy.parallel.pipeline > 1",
        ),
        (
            "policy.ranks=3",
            "policy.ranks = 3: must be a multiple of expert × expert_tensor × pipeline = 2",
        ),
        (
            "policy.parallel.context=2",
            "policy.parallel.context = 2: needs sequences that do not branch",
        ),
        (
            "train.micro_batch_tokens=31",
            "train.micro_batch_tokens = 31: must hold the longest model call, 129 tokens",
        ),
        (
            "policy.recompute=[full,moe]",
            "policy.recompute = ['full', 'moe']: full already covers everything",
        ),
        ("policy.recompute=[all]", "policy.recompute = ['all']: must be a list of full, core_attn"),
        (
            "optimizer.cpu_offload_fraction=0.5",
            "optimizer.cpu_offload_fraction = 0.5: there is no GPU here to offload from",
        ),
        (
            "optimizer.cpu_offload_fraction=1",
            "optimizer.cpu_offload_fraction = 1.0: Megatron could not load its checkpoints",
        ),
        (
            "policy.activation_offload_layers=-1",
            "policy.activation_offload_layers = -1: must not be negative",
        ),
        ("loss.type=ppo", "loss.type = ppo: must be one of ppo_clip, gspo, cispo, reinforce, nll"),
        ("loss.dual_clip=0.5", "loss.dual_clip = 0.5: must be more than 1"),
        ("loss.clip_low=1.2", "loss.clip_low = 1.2: must lie in 0 to 1"),
        ("loss.clip_low=-0.1", "loss.clip_low = -0.1: must lie in 0 to 1"),
        ("loss.clip_high=-0.1", "loss.clip_high = -0.1: must not be negative"),
        (
            "loss.importance_sampling.low=3",
            "loss.importance_sampling.low = 3.0: must be less than "
            "loss.importance_sampling.high = 2.0",
        ),
        (
            "routing_replay.min_agreement=2",
            "routing_replay.min_agreement = 2.0: must lie in 0 to 1",
        ),
        ("train.pack_layout=tree", "train.pack_layout = tree: must be one of trie, merge, flat"),
        ("engine.num_engines=0", "engine.num_engines = 0: must be 1 or more"),
        (
            "engine.tensor_parallel=3",
            "engine.tensor_parallel = 3: does not divide the model's 4 attention heads",
        ),
        (
            "engine.max_model_len=513",
            "engine.max_model_len = 513: must be from 2 to the model's 512 positions",
        ),
        (
            "engine.gpu_memory_utilization=1.5",
            "engine.gpu_memory_utilization = 1.5: must lie between 0 and 1",
        ),
        ("engine.request_timeout_s=0", "engine.request_timeout_s = 0: must be more than 0"),
        ("sync.backend=disk", "sync.backend = disk: must be one of auto, shm, nccl, ipc"),
        (
            "sync.backend=ipc",
            "sync.backend = ipc: shares memory of one GPU; needs cluster.colocate=true",
        ),
        (
            "sync.timeout_s=480",
            "sync.timeout_s = 480: with two of engine.health_timeout_s = 60 it must be less than "
            "the 600 s that ranks wait for each other",
        ),
        (
            "engine.health_timeout_s=150",
            "sync.timeout_s = 300: with two of engine.health_timeout_s = 150 it must be less",
        ),
        ("cluster.cpus_per_process=-1", "cluster.cpus_per_process = -1.0: must be more than 0"),
        ("model.path=nowhere", "model.path: nowhere: no such folder"),
        ("rollout.mode=text", "rollout.mode = text: must be one of tokens, chat"),
        ("rollout.top_p=0", "rollout.top_p = 0.0: must lie in (0, 1]"),
        ("eval.samples_per_prompt=0", "eval.samples_per_prompt = 0: must be 1 or more"),
        ("rollout.env_timeout_s=0", "rollout.env_timeout_s = 0.0: must be more than 0"),
        ("rollout.max_response_tokens=1", "rollout.max_response_tokens = 1: must be 2 or more"),
        (
            "rollout.max_response_tokens=512",
            "rollout.max_response_tokens = 512: engine.max_model_len is 256",
        ),
        (
            "rollout.max_prompt_tokens=300",
            "rollout.max_prompt_tokens = 300: engine.max_model_len is 256, of which",
        ),
        (
            "engine.max_model_len=9",
            "rollout.max_response_tokens = 9: engine.max_model_len is 9, and a prompt",
        ),
        ("env.option.x=1", "env.option.x: unknown key; did you mean env.options?"),
        (
            "rollout.template=x",
            "rollout.template = 'x': wrong type, dict[str, Any] is needed",
        ),
        ("run.wandb=maybe", "run.wandb = maybe: must be one of online, offline, disabled"),
    ],
)
def test_each_error_has_its_line(override, message):
    found = problems(override)
    assert any(message in line for line in found), found


ESTIMATORS = "grpo, grpo_nostd, rloo, maxrl, step_returns, gigpo"


@pytest.mark.parametrize(
    "command", [["train"], ["plan"], ["rollout", "--out", "x.safetensors"], ["eval"], ["config"]]
)
@pytest.mark.parametrize(
    "estimator, reason",
    [
        ("ppo", f"must be one of {ESTIMATORS}"),
        ("gae", "temporal estimators give per-token values across steps, which one advantage"),
        ("reinforce++", "temporal estimators give per-token values across steps"),
    ],
)
def test_s4_every_command_rejects_an_unknown_estimator(estimator, reason, command):
    (line,) = rejected(command[0], LOCAL, *command[1:], f"advantage.estimator={estimator}")
    assert line.startswith(f"error: advantage.estimator = {estimator}: {reason}")
    assert line.endswith("step_returns, gigpo")


def test_expert_tensor_must_equal_tensor_without_expert_parallelism():
    """Expert gradients would be summed over the wrong ranks."""
    found = problems(
        "policy.parallel.expert=1", "policy.parallel.tensor=2", "policy.parallel.expert_tensor=1"
    )
    assert found == [
        "policy.parallel.expert_tensor = 1: must be the tensor size 2 while "
        "policy.parallel.expert = 1"
    ]


def test_env_options_may_have_any_name(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(
        f"base: {Path(LOCAL).resolve()}\n"
        "env: {name: sql, options: {databases: here, a: {b: 1}}}\n"
    )
    config = load(base, ["env.options.query_timeout_s=2", "rollout.template.enable_thinking=false"])
    assert config.env.options == {"databases": "here", "a": {"b": 1}, "query_timeout_s": 2}
    assert config.rollout.template == {"enable_thinking": False}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "config.yaml") == paths.absolute(config)


def test_options_are_merged_with_those_of_the_base(tmp_path):
    (tmp_path / "base.yaml").write_text(
        f"base: {Path(LOCAL).resolve()}\nenv: {{options: {{a: {{b: 1, c: 2}}, d: [1]}}}}\n"
    )
    (tmp_path / "top.yaml").write_text("base: base.yaml\nenv: {options: {a: {c: 3}, d: [2]}}\n")
    config = load(tmp_path / "top.yaml", ["env.options.a.e=4"])
    assert config.env.options == {"a": {"b": 1, "c": 3, "e": 4}, "d": [2]}


@pytest.mark.parametrize(
    "override",
    [
        "run.name=a.b-c_d e",
        "run.name='...'",
        "run.name=5",
        f"run.name={'x' * 200}",
        "cluster.address=auto",
        "cluster.address=local",
        "cluster.address=head:6379",
        "cluster.address=10.0.0.7:6379",
        "cluster.address='[::1]:6379'",
        "optimizer.eps=1e-15",
        "train.seed=2147483647",
        "rollout.temperature=0.01",
        "cluster.cpus_per_process=0.0001",
        "cluster.object_store_mb=75",
        "sync.backend=shm",
        "optimizer.lr=1",
    ],
)
def test_unusual_values_are_accepted(override):
    load("configs/chase.yaml", [override])


def test_a_remote_cluster_is_not_limited_by_this_machine(monkeypatch):
    """Local memory and GPUs are not checked when Ray runs elsewhere."""
    elsewhere = [
        "cluster.address=head:6379",
        "sync.backend=nccl",
        "cluster.object_store_mb=16000000",
        "engine.cpu_kv_gb=60000",
    ]
    load("configs/chase.yaml", elsewhere)
    assert len(problems(*elsewhere[1:], config="configs/chase.yaml")) == 3
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    load("configs/chase.yaml", elsewhere[1:])


def test_colocated_engines_fit_on_the_ranks():
    found = problems("cluster.colocate=true", "engine.num_engines=3")
    assert found == [
        "engine.num_engines = 3: engines need num_engines × tensor_parallel = 3 places, "
        "cluster.colocate=true offers them the 2 of the policy's ranks"
    ]


def test_all_problems_at_once(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("train: {stepz: 1, seed: x}\npolicy: {precision: fp8}\nmodel: {path: nowhere}\n")
    found = problems("policy.ranks=0", config=bad)
    assert len(found) == 5
    assert found[0] == f"{bad}: train.stepz: unknown key; did you mean train.steps?"


def test_required_key(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    assert problems(config=tmp_path / "empty.yaml") == ["model.path: must be given"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("a: [1", "not readable as YAML"),
        ("- 1", "holds a list; `key: value` lines are needed"),
        ("\x00", "YAML"),
    ],
)
def test_unreadable_yaml(content, message, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    (problem,) = problems(config=path)
    assert problem.startswith(f"{path}: ") and message in problem and "\n" not in problem


def test_missing_and_circular_files(tmp_path):
    none = tmp_path / "none.yaml"
    assert problems(config=none) == [f"{none}: cannot be read (No such file or directory)"]
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    assert "leads back to the file itself" in problems(config=tmp_path / "a.yaml")[0]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"model_type": "gpt9"},
            "unknown architecture model_type='gpt9'; supported: llama, qwen2, qwen3",
        ),
        ({"hidden_size": None}, "hidden_size is missing, qwen3_moe needs it"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; silu is"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window=8 is shorter"),
        ({"attention_bias": True}, "attention_bias=True with mlp_bias=False is not supported"),
    ],
)
def test_unusable_architectures(change, message, tmp_path):
    shape = {**json.loads(TINY.read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (problem,) = problems(f"model.path={tmp_path}")
    assert problem.startswith(f"model.path: {tmp_path}/config.json: ") and message in problem


def test_exit_code_2_without_traceback_or_process(capsys, monkeypatch):
    monkeypatch.setattr(
        "multiprocessing.process.BaseProcess.start",
        lambda self: pytest.fail("a process was started"),
    )
    assert cli.main(["train", LOCAL, "policy.ranks=3", "train.stepz=1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) >= 2 and all(line.startswith("error: ") for line in errors)


def test_overrides_may_follow_an_option(capsys):
    assert cli.main(["rollout", LOCAL, "rollout.sample=1", "--out", "x", "rollout.prompt=1"]) == 2
    errors = capsys.readouterr().err
    assert "did you mean rollout.samples_per_prompt?" in errors
    assert "did you mean rollout.prompts?" in errors
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", LOCAL, "--fast", "train.steps=1"])
    assert ended.value.code == 2 and "unrecognized arguments: --fast" in capsys.readouterr().err


def test_missing_weights(capsys):
    assert cli.main(["train", LOCAL, "model.init=hf"]) == 2
    errors = capsys.readouterr().err
    assert "error: configs/models/chase: no weights; model.safetensors or" in errors


def test_version_lists_the_main_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    ours, packages = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and ours == f"megastep {megastep.__version__}"
    names = {part.split()[0] for part in packages.split(", ")}
    assert {"Python", "megatron-core", "torch", "ray"} <= names


HELP = """
import sys
from megastep import cli
try:
    cli.main(["--help"])
finally:
    print("torch" in sys.modules)
"""


def test_help_is_fast_and_imports_no_torch():
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)  # CPU time: the machine may be busy
    assert (end.ru_utime + end.ru_stime) - (begin.ru_utime + begin.ru_stime) < 1.0
    assert "usage: megastep" in run.stdout and run.stdout.endswith("False\n")


def test_layers_of_pipeline_stages():
    assert ParallelConfig().stages(3) == [(0, 1, 2)]
    assert ParallelConfig(pipeline=2).stages(4) == [(0, 1), (2, 3)]
    assert ParallelConfig(pipeline=2, virtual=2).stages(8) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    uneven = ParallelConfig(pipeline=2, layers_per_stage=[1, 3])
    assert uneven.stages(4) == [(0,), (1, 2, 3)]
