"""Bad model folders: one line with the file and its key, before any process starts."""

import json
import os
import shutil
from pathlib import Path

import pytest

from megastep.config import load
from megastep.errors import ArchitectureError
from megastep.models.architecture import parse_architecture
from tests.bad_input.harness import CONFIG, rejected

CHASE = Path("configs/models/chase")
MOE = json.loads((CHASE / "config.json").read_text())
MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "vocab_size",
    "max_position_embeddings",
    "decoder_sparse_step",
)
FLAGS = (
    "norm_topk_prob",
    "attention_bias",
    "tie_word_embeddings",
    "mlp_bias",
    "use_sliding_window",
)
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def folder_with(path: Path, shape) -> Path:
    (path / "config.json").write_text(shape if isinstance(shape, str) else json.dumps(shape))
    return path


def rejected_shape(path: Path, change: dict, line: str, shape: dict = MOE) -> None:
    folder_with(path, shape | change)
    lines = rejected(
        "train", CONFIG, f"model.path={path}", names=f"model.path: {path}/config.json: "
    )
    assert len(lines) == 1 and line in lines[0], lines


def rejected_as(change: dict, line: str) -> None:
    """The same line, without files."""
    with pytest.raises(ArchitectureError) as error:
        parse_architecture(MOE | change)
    message = str(error.value)
    assert line in message and "\n" not in message and len(message) < 300


@pytest.mark.parametrize(
    "value",
    ["4", 4.0, 4.5, 0, -1, True, [4], {"a": 4}, 10**9, 10**30, float("inf"), float("nan")],
    ids=str,
)
@pytest.mark.parametrize("key", COUNTS)
def test_c8_counts_are_whole_numbers_in_range(key, value):
    """C8: strings, floats and zeros were tracebacks; 1e9 layers hung."""
    rejected_as({key: value}, f"{key} = ")


@pytest.mark.parametrize("value", ["true", 1, [], 0.0], ids=str)
@pytest.mark.parametrize("key", FLAGS)
def test_c8_flags_are_true_or_false(key, value):
    rejected_as({key: value}, f"{key} = {value!r}: must be true or false")


@pytest.mark.parametrize(
    "change, line",
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers = 1000000000: must be a whole number from 1 to 1024",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: must be a whole number from 1"),
        ({"num_attention_heads": "4"}, "num_attention_heads = '4': must be a whole number"),
        ({"hidden_size": 64.0}, "hidden_size = 64.0: must be a whole number"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads = 3: does not divide num_attention_heads = 4",
        ),
        (
            {"num_key_value_heads": 8},
            "num_key_value_heads = 8: does not divide num_attention_heads = 4",
        ),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must not exceed num_experts = 8"),
        ({"num_experts": 0}, "num_experts = 0: must be a whole number"),
        ({"num_experts": None}, "num_local_experts is missing, qwen3_moe needs it"),
        (
            {"num_experts": 4096, "num_hidden_layers": 1000},
            "num_experts = 4096: in 1000 layers: more than 65536 experts",
        ),
        (
            {"head_dim": None, "hidden_size": 66},
            "hidden_size = 66: num_attention_heads = 4 does not divide it; give head_dim",
        ),
        ({"head_dim": 33}, "head_dim = 33: makes heads of 33; rotary embeddings need an even size"),
        ({"head_dim": None, "hidden_size": 4}, "hidden_size = 4: makes heads of 1"),
        ({"mlp_only_layers": 1}, "mlp_only_layers = 1: must be a list of layers, each from 0 to 1"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers = [2]: must be a list of layers"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers = ['0']: must be a list of layers"),
        ({"mlp_only_layers": "01"}, "mlp_only_layers = '01': must be a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0: must be a whole number from 1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6': must be a number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0: must be a number above 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06: must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be a number"),
        ({"initializer_range": float("inf")}, "initializer_range = inf: must be a number"),
        ({"initializer_range": "small"}, "initializer_range = 'small': must be a number"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4': must be a number above 0"),
        ({"rope_theta": 0}, "rope_theta = 0: must be a number above 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn': must be an object"),
        ({"rope_scaling": [YARN]}, "must be an object"),
        ({"rope_parameters": "default"}, "rope_parameters = 'default': must be an object"),
        ({"rope_parameters": 5}, "rope_parameters = 5: must be an object"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
        ({"rope_parameters": {"rope_type": 5}}, "rope type 5 is not supported"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope_scaling.factor is missing, rope type yarn needs it",
        ),
        (
            {"rope_scaling": YARN | {"factor": "4"}},
            "rope_scaling.factor = '4': must be a number above 0",
        ),
        (
            {"rope_scaling": YARN | {"factor": 0}},
            "rope_scaling.factor = 0: must be a number above 0",
        ),
        (
            {"rope_scaling": YARN | {"factor": -4}},
            "rope_scaling.factor = -4: must be a number above 0",
        ),
        (
            {"rope_scaling": YARN | {"beta_fast": "x"}},
            "rope_scaling.beta_fast = 'x': must be a number",
        ),
        (
            {"rope_parameters": LLAMA3 | {"low_freq_factor": None}},
            "rope_parameters.low_freq_factor is missing",
        ),
        (
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": []}},
            "= []: must be a number",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters.factor is missing, rope type linear needs it",
        ),
        ({"hidden_act": 5}, "hidden_act=5 is not supported"),
        ({"hidden_act": ["silu"]}, "hidden_act=['silu'] is not supported"),
        ({"model_type": 5}, "unknown architecture model_type=5"),
        ({"model_type": ["llama"]}, "unknown architecture model_type=['llama']"),
        ({"model_type": "x" * 10_000}, "unknown architecture model_type='xxx"),
        ({"model_type": "a\nb"}, r"unknown architecture model_type='a\nb'"),
        (
            {"use_sliding_window": True, "sliding_window": "8"},
            "sliding_window = '8': must be a whole number",
        ),
        (
            {"use_sliding_window": "yes", "sliding_window": 8},
            "use_sliding_window = 'yes': must be true or false",
        ),
        ({"vocab_size": None}, "vocab_size is missing"),
        (
            {"vocab_size": 10**9},
            "vocab_size = 1000000000: must be a whole number from 1 to 16777216",
        ),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings = 1000000000000: must be"),
    ],
)
def test_c8_shapes(change, line, tmp_path):
    """C8: 0 heads, 3 KV heads and top-k > experts were accepted, a rope string was a traceback."""
    rejected_shape(tmp_path, change, line)


@pytest.mark.parametrize(
    "change, line",
    [
        ({"num_local_experts": "4"}, "num_local_experts = '4': must be a whole number"),
        ({"num_local_experts": 0}, "num_local_experts = 0: must be a whole number"),
        (
            {"num_experts_per_tok": 5},
            "num_experts_per_tok = 5: must not exceed num_local_experts = 4",
        ),
        (
            {"num_attention_heads": 3},
            "hidden_size = 64: num_attention_heads = 3 does not divide it",
        ),
        ({"sliding_window": 100}, "sliding_window=100 is shorter than max_position_embeddings"),
        ({"sliding_window": -1}, "sliding_window = -1: must be a whole number"),
    ],
)
def test_c8_shapes_of_mixtral(change, line, tmp_path):
    rejected_shape(tmp_path, change, line, MIXTRAL)


@pytest.mark.parametrize(
    "content, line",
    [
        ("", "not readable as JSON"),
        ("{", "not readable as JSON"),
        ("[1]", "holds a list, an object is needed"),
        ("null", "holds a NoneType, an object is needed"),
        ("5", "holds a int, an object is needed"),
        ('"text"', "holds a str, an object is needed"),
        ("{}", "unknown architecture model_type=None"),
        ('{"model_type": "llama"}', "num_hidden_layers is missing, llama needs it"),
        ("[" * 100_000, "not readable as JSON (nested too deeply)"),
        ('{"a":' * 100_000, "not readable as JSON (nested too deeply)"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not readable as JSON (Exceeds the limit"),
        ("{'model_type': 'llama'}", "not readable as JSON"),
        ('{"model_type": "llama",}', "not readable as JSON"),
        (" " * ((4 << 20) + 1), "larger than 4 MiB"),
        ('{"model_type": "\\ud800"}', "unknown architecture model_type='\\ud800'"),
    ],
)
def test_c8_files(content, line, tmp_path):
    folder_with(tmp_path, content)
    rejected("train", CONFIG, f"model.path={tmp_path}", names=line)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"\x80", b"\x00", b"\x7fELF", b"{\xc3\x28}", b"\x93\x1f\x8b\x08"]
)
def test_c8_bytes(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    rejected("train", CONFIG, f"model.path={tmp_path}", names="config.json: not readable as JSON")


def test_c8_folders(tmp_path):
    rejected("train", CONFIG, f"model.path={tmp_path}", names="config.json: missing")
    rejected("train", CONFIG, f"model.path={tmp_path}/none", names="no such folder")
    rejected("train", CONFIG, f"model.path={CHASE}/config.json", names="no such folder")
    (tmp_path / "config.json").mkdir()
    rejected("train", CONFIG, f"model.path={tmp_path}", names="config.json: missing")
    (tmp_path / "config.json").rmdir()
    os.mkfifo(tmp_path / "config.json")
    rejected("train", CONFIG, f"model.path={tmp_path}", names="config.json: missing")
    (tmp_path / "loop").symlink_to("loop")
    rejected("train", CONFIG, f"model.path={tmp_path}/loop", names="no such folder")


# ---------------------------------------------------------------- transformers and tokenizers


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(CHASE, tmp_path / "model"))


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token_id": "x"},
        {"use_cache": "yes"},
        {"torch_dtype": "float99"},
        {"id2label": 5},
        {"layer_types": ["a"]},
        {"attention_dropout": "x"},
        {"quantization_config": "x"},
        {"bos_token_id": [1, 2]},
        {"num_labels": "x"},
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_c8_other_entries_are_checked_before_ranks_read_them(command, change, copy):
    """transformers would reject them in every rank and engine."""
    folder_with(copy, MOE | change)
    rejected(
        command, CONFIG, f"model.path={copy}", names="config.json: transformers cannot read it ("
    )


@pytest.mark.parametrize(
    "command", [("train",), ("eval",), ("rollout", "--out", "x.safetensors")], ids=lambda c: c[0]
)
def test_c8_a_vocabulary_smaller_than_the_tokenizer(command, copy):
    """C8: it was accepted, and a token without an embedding would have ended the run."""
    folder_with(copy, MOE | {"vocab_size": 40})
    (line,) = rejected(command[0], CONFIG, *command[1:], f"model.path={copy}")
    highest = max(json.loads((CHASE / "tokenizer.json").read_text())["model"]["vocab"].values())
    assert line == (
        f"error: model.path = {copy}: its tokenizer has token ids up to {highest}, vocab_size in "
        "config.json is 40; the tokenizer is another model's"
    )


def test_models_of_tests_and_configs_are_accepted():
    from tests.models import MODELS, SHAPE

    for family, extra in MODELS.values():
        assert parse_architecture({"model_type": family} | SHAPE | extra).layers == 4
    assert load(CONFIG).model.path == str(CHASE)
