"""D7: the configuration. Every mistake is one line that names the key, the value and what would be right."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megastep import cli
from megastep.config import Config, ConfigError, load, to_yaml

LOCAL = "configs/local.yaml"
TINY = Path("configs/models/tiny-qwen3-moe/config.json")


def problems(*overrides: str, config=LOCAL) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(config, list(overrides))
    return error.value.problems


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=str)
def test_shipped_configs_are_valid(path):
    load(path)


def test_layers_of_configuration(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(f"model: {{path: {TINY.parent.resolve()}, init: random}}\ntrain: {{steps: 7, seed: 3}}\n")
    top = tmp_path / "top.yaml"
    top.write_text("base: base.yaml\ntrain: {steps: 8}\noptimizer: {lr: 1e-3}\n")
    config = load(top, ["train.seed=4", "optimizer.betas=[0.8,0.9]"])
    assert (config.train.steps, config.train.seed, config.model.init) == (8, 4, "random")
    assert config.optimizer.lr == 1e-3 and config.optimizer.betas == [0.8, 0.9]
    assert config.optimizer.eps == Config().optimizer.eps


def test_resolved_config_reads_back(tmp_path):
    config = load(LOCAL, ["train.steps=9", "policy.parallel.layers_per_stage=null"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    "override, message",
    [
        ("policy.parallel.tenser=2", "policy.parallel.tenser: unknown key; did you mean policy.parallel.tensor?"),
        ("lr=1", "lr: unknown key; did you mean optimizer.lr?"),
        ("qwertz=1", "qwertz: unknown key; known sections: model, policy, optimizer, train, checkpoint, run"),
        ("policy.parallel=2", "policy.parallel: is a section"),
        ("train.steps=many", "train.steps = 'many': wrong type, int is needed"),
        ("train.steps=1.5", "train.steps = 1.5: wrong type, int is needed"),
        ("checkpoint.asynchronous=perhaps", "checkpoint.asynchronous = 'perhaps': wrong type, bool is needed"),
        ("train.steps", "train.steps: not of the form key=value"),
        ("policy.precision=fp8", "policy.precision = fp8: must be one of fp32, bf16"),
        ("train.steps=0", "train.steps = 0: must be 1 or more"),
        ("optimizer.lr=-1", "optimizer.lr = -1.0: must not be negative"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: must be two numbers of [0, 1)"),
        ("optimizer.warmup_steps=60", "optimizer.warmup_steps = 60: must be less than train.steps = 60"),
        ("policy.parallel.tensor=3", "policy.parallel.tensor = 3: does not divide the model's 4 attention heads"),
        ("policy.parallel.tensor=4", "policy.parallel.tensor = 4: does not divide the model's 2 key/value heads"),
        ("policy.parallel.expert=3", "policy.parallel.expert = 3: does not divide the model's 8 experts; 1, 2, 4, 8"),
        ("policy.parallel.pipeline=4", "policy.parallel.pipeline = 4: pipeline × virtual = 4 does not divide"),
        ("policy.parallel.layers_per_stage=[3]", "adds up to 3, the model has 2 layers"),
        ("policy.parallel.virtual=2", "policy.parallel.virtual = 2: needs policy.parallel.pipeline > 1"),
        ("policy.ranks=3", "policy.ranks = 3: must be a multiple of expert × expert_tensor × pipeline = 2"),
        ("policy.parallel.context=2", "policy.parallel.context = 2: context parallelism is not supported yet"),
        ("train.batch_sequences=63", "train.batch_sequences = 63: must be a multiple of data-parallel ranks"),
        ("train.sequence_tokens=513", "train.sequence_tokens = 513: the model has 512 positions"),
        ("model.path=nowhere", "model.path: nowhere: no such folder"),
        ("run.wandb=maybe", "run.wandb = maybe: must be one of auto, online, offline, disabled"),
    ],
)
def test_each_mistake_has_its_line(override, message):
    assert any(p.startswith(message) or message in p for p in problems(override)), problems(override)


def test_expert_gradients_would_be_summed_over_the_wrong_ranks():
    found = problems("policy.parallel.expert=1", "policy.parallel.tensor=2", "policy.parallel.expert_tensor=1")
    assert found == ["policy.parallel.expert_tensor = 1: must be the tensor size 2 while policy.parallel.expert = 1"]


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
    [("a: [1", "not readable as YAML"), ("- 1", "holds a list; `key: value` lines are needed"), ("\x00", "YAML")],
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
        ({"model_type": "gpt9"}, "unknown architecture model_type='gpt9'; supported: llama, qwen2, qwen3"),
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
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda self: pytest.fail("a process was started"))
    assert cli.main(["train", LOCAL, "policy.ranks=3", "train.stepz=1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) >= 2 and all(line.startswith("error: ") for line in errors)


def test_weights_that_are_not_there(capsys):
    assert cli.main(["train", LOCAL, "model.init=hf"]) == 2
    assert "error: configs/models/tiny-qwen3-moe: no weights; model.safetensors or" in capsys.readouterr().err


def test_help_is_fast_and_imports_no_torch():
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    script = "import sys, megastep.cli as c\ntry: c.main(['--help'])\nfinally: print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)  # CPU time: the machine may be busy
    assert (end.ru_utime + end.ru_stime) - (begin.ru_utime + begin.ru_stime) < 1.0
    assert "usage: megastep" in run.stdout and run.stdout.endswith("False\n")
