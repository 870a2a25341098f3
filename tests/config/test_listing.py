"""`megastep config`: resolved values with their sources, and every key of the schema."""

import re
from pathlib import Path

import pytest

from megastep import redaction
from megastep.config import Config, load
from megastep.config.schema import settings, value_of, written
from tests.bad_input.harness import rejected, run

LOCAL = Path("configs/local.yaml").resolve()


def resolved(*argv: str) -> dict[str, tuple[str, str]]:
    """Key → its value and its source, as printed."""
    result = run("config", *argv)
    assert result.code == 0 and result.err == "", result.err
    lines = [re.fullmatch(r"(\S+) = (.*?) +# (.+)", line) for line in result.out.splitlines()]
    return {line[1]: (line[2], line[3]) for line in lines}


def test_every_value_has_its_source(tmp_path):
    """default ← base ← file ← command line"""
    base = tmp_path / "base.yaml"
    base.write_text(f"base: {LOCAL}\ntrain: {{seed: 3, eval_every: 4}}\n")
    top = tmp_path / "top.yaml"
    top.write_text("base: base.yaml\ntrain: {eval_every: 5, steps: 30}\nasync: {on_stale: drop}\n")
    found = resolved(top, "train.steps=20", "async.max_staleness=1")
    assert found["train.seed"] == ("3", str(base))
    assert found["train.eval_every"] == ("5", str(top))
    assert found["train.steps"] == ("20", "command line")
    assert found["async.on_stale"] == ("drop", str(top))
    assert found["async.max_staleness"] == ("1.0", "command line")
    assert found["train.pack_layout"] == ("trie", "default")
    assert found["data.eval"] == ("null", "default")
    assert found["cluster.colocate"] == ("false", "default")


def test_every_key_is_printed_once():
    assert list(resolved(LOCAL)) == [written(key) for key in settings()]


def test_values_are_those_of_the_run():
    found = resolved(LOCAL, "optimizer.lr=0.25", "policy.recompute=[moe]")
    config = load(LOCAL, ["optimizer.lr=0.25", "policy.recompute=[moe]"])
    for key in ("optimizer.lr", "policy.recompute", "rollout.prompts", "model.path"):
        assert found[key][0] == str(value_of(config, key))


def test_secrets_are_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOKUP_KEY", "k-5ee8d1")
    path = tmp_path / "secret.yaml"
    path.write_text(
        f"base: {LOCAL}\nenv: {{options: {{api_key: in-the-file, key: '${{env:LOOKUP_KEY}}'}}}}\n"
    )
    out = run("config", path, "env.options.password=on-the-line", "run.name=mine").out
    assert not [secret for secret in ("in-the-file", "on-the-line", "k-5ee8d1") if secret in out]
    options, source = resolved(path)["env.options"]
    assert options == f"{{'api_key': '{redaction.HIDDEN}', 'key': '${{env:LOOKUP_KEY}}'}}"
    assert source == str(path)


# ---------------------------------------------------------------- --list


def listed() -> dict[str, list[str]]:
    """Key → the rest of its line and the indented lines that follow."""
    result = run("config", "--list")
    assert result.code == 0 and result.err == ""
    found: dict[str, list[str]] = {}
    key = ""
    for line in result.out.splitlines():
        if line.startswith(" "):
            found[key].append(line.strip())
        else:
            key, _, rest = line.partition(": ")
            found[key] = [rest]
    return found


def test_list_has_every_key_with_type_default_and_meaning():
    found = listed()
    assert list(found) == [written(key) for key in settings()]
    assert found["model.path"][0] == "str = required"
    assert found["env.name"][0] == "str | None = null"
    assert found["checkpoint.every_minutes"] == [
        "float = 15.0",
        settings()["checkpoint.every_minutes"].metadata["meaning"],
        "≥ 0",
    ]
    assert found["filters.truncated"][0] == "str = keep"
    assert found["filters.truncated"][2] == "one of keep, mask, drop"
    assert found["rollout.top_p"][2] == "> 0, ≤ 1"
    assert found["policy.parallel.tensor"][0] == "int = 1"


def test_list_has_the_defaults_of_the_schema():
    found = listed()
    for key in ("optimizer.lr", "optimizer.betas", "train.seed", "loss.type", "sync.bucket_mb"):
        assert found[key][0].partition(" = ")[2] == str(value_of(Config(), key))


@pytest.mark.parametrize("key", settings())
def test_every_key_has_a_meaning(key):
    meaning = settings()[key].metadata["meaning"]
    assert meaning.strip() and "\n" not in meaning


# ---------------------------------------------------------------- bad input


def test_config_and_list_are_both_missing():
    assert rejected("config") == ["error: CONFIG is needed, or --list"]


def test_invalid_input_is_one_line_per_problem(tmp_path):
    lines = rejected("config", LOCAL, "train.stepz=1", "train.seed=-1")
    assert len(lines) == 2 and lines[0].startswith("error: train.stepz: unknown key; did you mean")
    assert run("config", LOCAL, "train.stepz=1").out == ""
    rejected("config", tmp_path / "none.yaml", names="none.yaml: cannot be read")
    rejected("config", LOCAL, "train.steps", names="not of the form key=value")
    rejected("config", LOCAL, "--lists", names="unrecognized arguments: --lists")
