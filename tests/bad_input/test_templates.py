"""Invalid chat templates, template options, generation_config.json and tokenizer files: one line,
before a process starts."""

import json
import shutil
import threading
from pathlib import Path

import pytest

import megastep.trainer.loop  # noqa: F401  imported here, so that no case pays for it
from megastep.errors import RenderError
from megastep.rollout import renderer
from megastep.rollout.renderer import Renderer, load_tokenizer

from .harness import CONFIG, check_lines, rejected

MODEL = Path("configs/models/chase")
load_tokenizer(MODEL)
SMALL = ("data.generated_rows=100", "warm_start.trajectories=0")


LOOP = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}"
    "{% endfor %}{% endfor %}"
)


@pytest.fixture
def model(tmp_path) -> Path:
    return shutil.copytree(MODEL, tmp_path / "model")


def problem(model, mode="chat", options=None) -> str:
    with pytest.raises(RenderError) as error:
        Renderer.for_model(model, mode, options)
    check_lines([f"error: {error.value}"])
    assert "\n" not in str(error.value)
    return str(error.value)


TEMPLATES = {
    "type_error": ("{{ 1 + 'a' }}", "unsupported operand"),
    "zero": ("{{ 1 / 0 }}", "division by zero"),
    "index": ("{{ messages[99].content }}", "has no element 99"),
    "undefined": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "attribute": ("{{ messages[0].content.nope() }}", "no attribute 'nope'"),
    "syntax": ("{% if %}", "Expected an expression"),
    "unclosed": ("{% for m in messages %}", "Unexpected end of template"),
    "unknown_tag": ("{% frobnicate %}", "unknown tag"),
    "unknown_filter": ("{{ messages | frobnicate }}", "No filter named"),
    "raises": ("{{ raise_exception('not\\nme') }}", "rejects messages of user: not me"),
    "unsafe": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "include": ("{% include 'x' %}", "no loader"),
    "extends": ("{% extends 'x' %}", "no loader"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "surrogate": ("{{ '\\ud800' }}", "lone surrogate"),
    "key": ("{{ {}['x'].y }}", "has no attribute 'x'"),
    "value": ("{{ 'x' | int(base=99) + 'y' }}", "rejects"),
    "overflow": ("{{ 'x' * 10**30 }}", "rejects"),
    "list": ("{{ messages + 'x' }}", "rejects"),
    "tojson": ("{{ raise_exception | tojson }}", "rejects"),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_c9_templates_that_raise(name, mode, model):
    template, message = TEMPLATES[name]
    (model / "chat_template.jinja").write_text(template)
    line = problem(model, mode)
    assert message in line and line.startswith(f"model.path = {model}: ")


@pytest.mark.parametrize("mode", ["tokens", "chat"])
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        LOOP,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
    ],
)
def test_c9_endless_templates(template, mode, model, monkeypatch):
    monkeypatch.setattr(renderer, "TRIAL_S", 0.1)
    (model / "chat_template.jinja").write_text(template)
    assert "takes longer than 0.1 s for trial conversations; does it loop forever?" in problem(
        model, mode
    )
    for thread in threading.enumerate():
        if thread.name == "template":
            thread.join(5)
            assert not thread.is_alive(), "the template still runs"


@pytest.mark.parametrize("mode", ["tokens", "chat"])
@pytest.mark.parametrize(
    "condition",
    [
        "messages | length > 4",
        "messages | length > 50",
        "messages[-1].content | length > 500",
        "messages[0].content | length > 500 or messages | length > 10",
    ],
)
def test_c9_templates_that_are_endless_in_a_long_conversation(condition, mode, model, monkeypatch):
    """They would block a run, with every episode, in a later turn."""
    monkeypatch.setattr(renderer, "TRIAL_S", 1.0)
    own = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(
        "{% if " + condition + " %}" + LOOP + "{% endif %}" + own
    )
    assert "takes longer than 1 s for trial conversations; does it loop forever?" in problem(
        model, mode
    )


@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_a_template_may_reject_long_conversations(mode, model):
    own = (model / "chat_template.jinja").read_text()
    limit = "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}"
    (model / "chat_template.jinja").write_text(limit + own)
    Renderer.for_model(model, mode)


@pytest.mark.parametrize(
    "template", ["", "text", "{{ messages[0].content }}", "{{ messages[-1].role }}<eot>"]
)
def test_templates_that_do_not_close_a_turn(template, model):
    (model / "chat_template.jinja").write_text(template)
    line = problem(model, "tokens")
    assert "does not close the model's turn" in line or "has no chat template" in line


OWN = [
    "messages",
    "conversation",
    "conversations",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
]


@pytest.mark.parametrize("name", OWN)
def test_c9_reserved_options(name, model):
    assert problem(model, "chat", {name: 1}).startswith(
        f"rollout.template.{name}: not an argument of the template"
    )


@pytest.mark.parametrize(
    "options", [{"tools": "x"}, {"tools": 5}, {"documents": "x"}, {"documents": [1]}, {1: 2}]
)
def test_c9_options_of_a_wrong_type(options, model):
    assert "rejects messages of user" in problem(model, "chat", options)


GENERATION = {
    "empty": ("", "not readable as JSON"),
    "text": ("no JSON", "not readable as JSON"),
    "half": ('{"eos_token_id": [1, ', "not readable as JSON"),
    "deep": ("[" * 100_000, "not readable as JSON"),
    "binary": ("\0\1\2", "not readable as JSON"),
    "list": ("[3]", "holds a list; an object is needed"),
    "null": ("null", "holds a NoneType"),
    "number": ("3", "holds a int"),
    "string_id": ('{"eos_token_id": "3"}', "eos_token_id has '3'"),
    "float_id": ('{"eos_token_id": 3.0}', "eos_token_id has '3.0'"),
    "bool_id": ('{"eos_token_id": true}', "eos_token_id has 'True'"),
    "negative": ('{"eos_token_id": -1}', "eos_token_id has '-1'; token ids of 0 to 63 are needed"),
    "too_large": ('{"eos_token_id": 64}', "eos_token_id has '64'; token ids of 0 to 63 are needed"),
    "huge": ('{"eos_token_id": 1' + "0" * 4000 + "}", "eos_token_id has '1000"),
    "one_of_many": ('{"eos_token_id": [3, 4, 640]}', "eos_token_id has '640'"),
    "nested": ('{"eos_token_id": [[3]]}', "eos_token_id has '[3]'"),
    "object": ('{"eos_token_id": {"a": 3}}', "eos_token_id has"),
    "null_in_list": ('{"eos_token_id": [null]}', "eos_token_id has 'None'"),
    "nan": ('{"eos_token_id": NaN}', "eos_token_id has 'nan'"),
}


@pytest.mark.parametrize("name", GENERATION)
def test_c9_generation_config(name, model):
    content, message = GENERATION[name]
    (model / "generation_config.json").write_text(content)
    line = problem(model)
    assert message in line and str(model / "generation_config.json") in line


@pytest.mark.parametrize(
    "content", ["{}", '{"eos_token_id": null}', '{"eos_token_id": []}', '{"eos_token_id": [0, 63]}']
)
def test_valid_generation_configs(content, model):
    (model / "generation_config.json").write_text(content)
    assert Renderer.for_model(model, "chat").end_id == 3


TOKENIZERS = [
    "",
    "{",
    "[]",
    "null",
    "3",
    "{}",
    '{"model": {}}',
    '{"version": "1.0", "model": {"type": "BPE"}}',
    "[" * 9999,
    '{"version": "1.0", "added_tokens": 5, '
    '"model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}',
]


@pytest.mark.parametrize("content", TOKENIZERS, ids=range(len(TOKENIZERS)))
def test_tokenizer_files(content, model):
    (model / "tokenizer.json").write_text(content)
    assert problem(model).startswith(f"model.path = {model}: ")


@pytest.mark.parametrize(
    "changed",
    [
        {"eos_token": None},
        {"eos_token": 5},
        {"eos_token": ["x"]},
        {"chat_template": 5},
        {"tokenizer_class": 5},
        {"added_tokens_decoder": [1]},
    ],
)
def test_tokenizer_configs(changed, model):
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    if changed.get("chat_template"):
        (model / "chat_template.jinja").unlink()
    assert problem(model).startswith(f"model.path = {model}: ")


@pytest.mark.parametrize(
    "change, names",
    [
        ("chat_template.jinja", "division by zero"),
        ("generation_config.json", "generation_config.json"),
        ("tokenizer.json", "its tokenizer cannot be loaded"),
    ],
)
def test_c9_on_the_command_line(change, names, model):
    (model / change).write_text("{{ 1 / 0 }}")
    rejected("train", CONFIG, f"model.path={model}", *SMALL, names=names)


def test_c9_an_option_on_the_command_line():
    rejected(
        "train", CONFIG, "rollout.template.messages=1", *SMALL, names="rollout.template.messages"
    )
