"""D3: secrets of environments are named in the config, read at use, written nowhere; nothing is uploaded unasked."""

import asyncio
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from urllib.parse import quote

import numpy as np
import pytest
import yaml

from megastep import redaction
from megastep.config import load, paths, to_yaml
from megastep.errors import ConfigError
from megastep.report.metrics_log import MetricsLog, _wandb_id
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.data import Prompt
from megastep.rollout.env import Env, Outcome
from megastep.rollout.generation import Generation, Sampling
from megastep.rollout.pool import Pool
from megastep.rollout.renderer import Renderer
from megastep.trainer.rundir import Run
from tests.runs import LOCAL

SECRET = "k-5ee8d1"


@pytest.fixture(autouse=True)
def variable(monkeypatch):
    monkeypatch.setenv("LOOKUP_KEY", SECRET)


def config(*given: str):
    options = "{api_key: '${env:LOOKUP_KEY}', nested: {urls: ['http://h/${env:LOOKUP_KEY}']}}"
    return load(LOCAL, [f"env.options={options}", *given])


def test_a_variable_is_read_when_the_environment_is_made():
    options = config().env.options
    assert SECRET not in repr(options)
    assert redaction.resolved(options) == {
        "api_key": SECRET,
        "nested": {"urls": [f"http://h/{SECRET}"]},
    }


def test_what_is_written_can_be_run_again(tmp_path):
    """The name of the variable stands in config.yaml, which is for its owner alone."""
    given = config(f"run.dir={tmp_path}", "run.name=r")
    Run.find(given, "r").create(given)
    written = tmp_path / "r" / "config.yaml"
    assert SECRET not in written.read_text() and written.stat().st_mode & 0o777 == 0o600
    assert load(written) == paths.absolute(given)


class Leaky(Env):
    """Says its key where the row tells it to, after so many other characters."""

    def __init__(self, row, *, api_key: str):
        self.row, self.said = (
            row,
            row["before"] * "x" + row.get("form", str)(api_key) + " was refused",
        )
        if row["where"] == "made":
            raise RuntimeError(self.said)

    async def start(self):
        if self.row["where"] == "start":
            raise RuntimeError(self.said)
        return self.said if self.row["where"] == "message" else [{"role": "user", "content": "?"}]

    async def step(self, text, ids) -> Outcome:
        if self.row["where"] == "step":
            raise RuntimeError(self.said)
        if self.row["where"] == "outcome":
            return [self.said]
        return Outcome(done=True, metrics={"said": self.said, self.said: [self.said]})

    async def close(self):
        if self.row["where"] == "close":
            raise RuntimeError(self.said)


async def ends_at_once(*_, **__):
    return Generation(
        np.array([3], np.int32), np.zeros(1, np.float32), np.array([[0, 1]], np.int32), "stop"
    )


def said_by(row: dict) -> str:
    """All that is kept of an episode's metrics."""
    pool = Pool(agent(ends_at_once), Leaky, 1, 1, {"api_key": "${env:LOOKUP_KEY}"})
    (group,) = asyncio.run(pool.run([Prompt(0, row)]))
    return json.dumps(group.trajectories[0].env_metrics)


@pytest.mark.parametrize(
    "where", ["made", "start", "message", "step", "outcome", "close", "metrics"]
)
@pytest.mark.parametrize("before", [0, 20, 45, 60, 270, 290, 985])
def test_what_an_environment_says_is_kept_free_of_the_value(where, before, monkeypatch):
    """Real episodes: what an exception says goes into metrics and rollout files. Texts are cut at 80, 300 and 1000
    characters, and what is left of a value at the cut would not be found."""
    key = "".join(chr(ord("A") + i % 26) for i in range(43))
    monkeypatch.setenv("LOOKUP_KEY", key)
    said = said_by({"where": where, "before": before})
    assert "xxx" in said or not before
    assert not any(key[i : i + 4] in said for i in range(40)), said


@pytest.mark.parametrize(
    "value", ["ab cd\nef gh", "abcdefgh\n", " abcd  efgh ", "a+b/c=d&e", "caf\u00e9 x"]
)
@pytest.mark.parametrize(
    "form",
    [str, repr, lambda key: " ".join(key.split()), lambda key: quote(key, safe="")],
    ids=["plain", "repr", "one line", "quoted"],
)
def test_the_value_is_found_however_it_is_written(value, form, monkeypatch):
    monkeypatch.setenv("LOOKUP_KEY", value)
    for where in ("start", "metrics"):
        said = json.loads(said_by({"where": where, "before": 0, "form": form}))
        text = said["error"] if where == "start" else said["said"]
        assert re.fullmatch(r"(RuntimeError: )?\W*\*\*\*\W*( was refused)", text), text


@functools.cache
def renderer() -> Renderer:
    return Renderer.for_model("configs/models/chase", "chat", {})


def agent(generate) -> Agent:
    return Agent(generate, renderer(), Limits(2, 64, 8, 5.0), Sampling(max_tokens=8), seed="s")


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "apiKey",
        "API-KEY",
        "token",
        "hf_token",
        "password",
        "db_passwd",
        "secret",
        "client_secret",
        "access_key",
        "authorization",
        "credentials",
        "private_key",
        "openai_key",
        "search_key",
        "apiKeys",
        "x-api-key",
        "OpenAIKey",
        "key",
        "key2",
        "auth_tokens",
    ],
)
def test_values_under_such_keys_are_left_out(key, tmp_path):
    given = load(LOCAL, [f"env.options={json.dumps({key: SECRET, 'deep': [{key: SECRET}]})}"])
    assert SECRET not in to_yaml(given) and SECRET not in repr(redaction.redacted(asdict(given)))
    (tmp_path / "config.yaml").write_text(to_yaml(given))
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "config.yaml")
    assert error.value.problems[0].startswith(
        f"env.options.{key} = ***: a secret was left out when this file was"
    )


@pytest.mark.parametrize(
    "key", ["max_tokens", "tokens", "keyboard", "monkey", "keyed", "author", "token_limit"]
)
def test_values_under_other_keys_are_kept(key):
    assert yaml.safe_load(to_yaml(load(LOCAL, [f"env.options.{key}=plain"])))["env"]["options"] == {
        key: "plain"
    }


@pytest.mark.parametrize(
    "below, written",
    [
        ("12345678", "***"),
        ("0.5", "***"),
        ("[a1, [b1]]", ["***", ["***"]]),
        ("true", True),
        ("null", None),
        ("''", ""),
        ("{user: bob, value: hunter2}", {"user": "***", "value": "***"}),
        ("[{value: 7}]", [{"value": "***"}]),
        ("['${env:LOOKUP_KEY}']", ["${env:LOOKUP_KEY}"]),
        ("{a: '${env:LOOKUP_KEY}'}", {"a": "${env:LOOKUP_KEY}"}),
    ],
)
@pytest.mark.parametrize("key", ["password", "credentials", "apiKeys"])
def test_all_that_stands_below_such_a_key_is_left_out(key, below, written, tmp_path):
    given = load(LOCAL, [f"env.options={{{key}: {below}}}"])
    text = to_yaml(given)
    assert yaml.safe_load(text)["env"]["options"] == {key: written}
    (tmp_path / "config.yaml").write_text(text)
    if "***" not in repr(written):
        assert load(tmp_path / "config.yaml").env.options == given.env.options
        return
    with pytest.raises(ConfigError, match=rf"env.options.{key}\S* = \*\*\*: a secret was left out"):
        load(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "address, written",
    [
        ("https://me:pw1@host/x", "https://***@host/x"),
        ("https://pw1@host/x", "https://***@host/x"),
        ("postgres://u:pw@ss1@h:5432/db", "postgres://***@h:5432/db"),
        ("postgres://u:pw/w1@h/db", "postgres://***@h/db"),
        ("postgres://u:pw?#w1@h", "postgres://***@h"),
        ("https://h/?api_key=pw1", "https://h/?api_key=***"),
        ("https://h/s?q=a&accessToken=pw1;x#y&n=3", "https://h/s?q=a&accessToken=***&n=3"),
        ("/s?x-api%2Dkey=pw1", "/s?x-api%2Dkey=***"),
    ],
)
def test_secrets_in_an_address_are_left_out(address, written, tmp_path):
    text = to_yaml(load(LOCAL, [f"env.options.url={address}"]))
    assert yaml.safe_load(text)["env"]["options"]["url"] == written
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="env.options.url = .*a secret was left out"):
        load(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "address",
    [
        "https://h/a@b",
        "https://h:80/x?q=1:2",
        "https://h?mail=a@b",
        "https://h/?q=key&max_tokens=5",
        "me@host",
        "https://${env:LOOKUP_KEY}@h/x",
        "pg://me:${env:LOOKUP_KEY}@h",
        "https://h/?api_key=${env:LOOKUP_KEY}&n=1",
        "pg://${env:LOOKUP_KEY}:${env:LOOKUP_KEY}@h",
    ],
)
def test_addresses_without_a_secret_are_kept(address):
    assert (
        yaml.safe_load(to_yaml(load(LOCAL, [f"env.options.url={address}"])))["env"]["options"][
            "url"
        ]
        == address
    )


def test_a_variable_that_is_not_set_is_told_before_anything_starts():
    with pytest.raises(ConfigError) as error:
        load(LOCAL, ["env.options.api_key=${env:NO_SUCH_VARIABLE}"])
    (line,) = error.value.problems
    assert (
        line
        == "env.options.api_key = ${env:NO_SUCH_VARIABLE}: the environment variable NO_SUCH_VARIABLE is not set"
    )


# ---------------------------------------------------------------- W&B


def test_a_key_alone_uploads_nothing(tmp_path):
    """A real wandb in a process of its own: with WANDB_API_KEY set, files are written and nobody is called."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom megastep.config import load\n"
        "from megastep.report.metrics_log import MetricsLog\n"
        f"config = load({LOCAL!r}, ['run.wandb_project=mine', 'env.options.password={SECRET}'])\n"
        "with MetricsLog.of_run(Path(sys.argv[1]), -1, config) as log: log.write(1, {'train/loss': 1.0})"
    )
    folder = tmp_path / "r"
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_MODE"} | {
        "WANDB_API_KEY": "0" * 40
    }
    done = subprocess.run(
        [sys.executable, "-c", script, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "uploaded" not in done.stdout, done.stderr
    (record,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"mine" in content and SECRET.encode() not in content
    assert f"run-{(folder / 'wandb_id').read_text()}.wandb" == record.name


class Recorder:
    url, id = "https://there/mine/abc", "abc"

    def __init__(self, **given):
        self.given = given


@pytest.fixture
def started(monkeypatch):
    """wandb.init's arguments; uploading needs a server."""
    import wandb

    found = []
    monkeypatch.setattr(wandb, "init", lambda **given: found.append(given) or Recorder(**given))
    return found


def test_uploading_is_said_with_its_place(tmp_path, started, capsys):
    given = config(
        "run.wandb=online", "run.wandb_project=p", "run.wandb_entity=e", "run.wandb_id=mine"
    )
    MetricsLog.of_run(tmp_path, -1, given)
    assert (
        capsys.readouterr().out
        == "metrics and config are uploaded to W&B: https://there/mine/abc\n"
    )
    (place,) = started
    assert (place["project"], place["entity"], place["id"], place["mode"]) == (
        "p",
        "e",
        "mine",
        "online",
    )
    assert SECRET not in repr(place["config"])


def test_equal_names_never_merge_and_a_resumed_run_goes_on(tmp_path):
    one, two = tmp_path / "a" / "same", tmp_path / "b" / "same"
    for folder in (one, two):
        folder.mkdir(parents=True)
    first = _wandb_id(one, is_new=True)
    assert first != _wandb_id(two, is_new=True)
    assert _wandb_id(one, is_new=False) == first  # resumed
    assert _wandb_id(one, is_new=True) != first  # begun anew
