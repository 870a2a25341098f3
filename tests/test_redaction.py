"""D3: secrets of environments are read at use and written nowhere; uploads are opt-in."""

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
from megastep.rollout.pool import LocalPool
from megastep.rollout.renderer import Renderer
from megastep.trainer.rundir import Run
from megastep.types import FinishReason
from tests.processes import wait_for
from tests.runs import LOCAL

SECRET = "k-5ee8d1"


@pytest.fixture(autouse=True)
def variable(monkeypatch):
    monkeypatch.setenv("LOOKUP_KEY", SECRET)


def config(*given: str):
    options = "{api_key: '${env:LOOKUP_KEY}', nested: {urls: ['http://h/${env:LOOKUP_KEY}']}}"
    return load(LOCAL, [f"env.options={options}", *given])


def test_a_variable_is_read_when_the_environment_is_created():
    options = config().env.options
    assert SECRET not in repr(options)
    assert redaction.resolved(options) == {
        "api_key": SECRET,
        "nested": {"urls": [f"http://h/{SECRET}"]},
    }


def test_the_saved_config_can_be_run_again(tmp_path):
    """config.yaml holds the name of the variable; only its owner can read it."""
    given = config(f"run.dir={tmp_path}", "run.name=r")
    Run.find(given, "r").create(given)
    written = tmp_path / "r" / "config.yaml"
    assert SECRET not in written.read_text() and written.stat().st_mode & 0o777 == 0o600
    assert load(written) == paths.absolute(given)


class Leaky(Env):
    """Leaks its key in the method `where` of the row, after `before` other characters."""

    def __init__(self, row, *, api_key: str):
        form = row.get("form", str)
        self.row = row
        self.leak = row["before"] * "x" + form(api_key) + " was rejected"
        if row["where"] == "init":
            raise RuntimeError(self.leak)

    async def start(self):
        if self.row["where"] == "start":
            raise RuntimeError(self.leak)
        return self.leak if self.row["where"] == "message" else [{"role": "user", "content": "?"}]

    async def step(self, text, ids) -> Outcome:
        if self.row["where"] == "step":
            raise RuntimeError(self.leak)
        if self.row["where"] == "outcome":
            return [self.leak]
        return Outcome(done=True, metrics={"text": self.leak, self.leak: [self.leak]})

    async def close(self):
        if self.row["where"] == "close":
            raise RuntimeError(self.leak)


async def ends_at_once(*_, **__):
    return Generation(
        np.array([3], np.int32),
        np.zeros(1, np.float32),
        np.array([[0, 1]], np.int32),
        FinishReason.STOP,
    )


def metrics_of(row: dict) -> str:
    """The metrics of an episode, as JSON."""
    pool = LocalPool(agent(ends_at_once), Leaky, 1, 1, {"api_key": "${env:LOOKUP_KEY}"})
    (group,) = asyncio.run(pool.run([Prompt(0, row)]))
    return json.dumps(group.trajectories[0].env_metrics)


@pytest.mark.parametrize(
    "where", ["init", "start", "message", "step", "outcome", "close", "metrics"]
)
@pytest.mark.parametrize("before", [0, 20, 45, 60, 270, 290, 985])
def test_texts_of_an_environment_are_redacted(where, before, monkeypatch):
    """Real episodes: texts of exceptions are in metrics and rollout files.

    Texts are cut at 80, 300 and 1000 characters; the rest of a value at the cut must be hidden too.
    """
    key = "".join(chr(ord("A") + i % 26) for i in range(43))
    monkeypatch.setenv("LOOKUP_KEY", key)
    metrics = metrics_of({"where": where, "before": before})
    assert "xxx" in metrics or not before
    assert not any(key[i : i + 4] in metrics for i in range(40)), metrics


@pytest.mark.parametrize(
    "value", ["ab cd\nef gh", "abcdefgh\n", " abcd  efgh ", "a+b/c=d&e", "caf\u00e9 x"]
)
@pytest.mark.parametrize(
    "form",
    [str, repr, lambda key: " ".join(key.split()), lambda key: quote(key, safe="")],
    ids=["plain", "repr", "one line", "quoted"],
)
def test_every_form_of_the_value_is_redacted(value, form, monkeypatch):
    monkeypatch.setenv("LOOKUP_KEY", value)
    for where in ("start", "metrics"):
        metrics = json.loads(metrics_of({"where": where, "before": 0, "form": form}))
        text = metrics["error"] if where == "start" else metrics["text"]
        assert re.fullmatch(r"(RuntimeError: )?\W*\*\*\*\W*( was rejected)", text), text


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
def test_values_under_secret_keys_are_redacted(key, tmp_path):
    given = load(LOCAL, [f"env.options={json.dumps({key: SECRET, 'deep': [{key: SECRET}]})}"])
    assert SECRET not in to_yaml(given) and SECRET not in repr(redaction.redacted(asdict(given)))
    (tmp_path / "config.yaml").write_text(to_yaml(given))
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "config.yaml")
    assert error.value.problems[0].startswith(
        f"env.options.{key} = ***: a secret was removed when this file was"
    )


@pytest.mark.parametrize(
    "key", ["max_tokens", "tokens", "keyboard", "monkey", "keyed", "author", "token_limit"]
)
def test_values_under_other_keys_are_kept(key):
    text = to_yaml(load(LOCAL, [f"env.options.{key}=plain"]))
    assert yaml.safe_load(text)["env"]["options"] == {key: "plain"}


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
def test_everything_below_a_secret_key_is_redacted(key, below, written, tmp_path):
    given = load(LOCAL, [f"env.options={{{key}: {below}}}"])
    text = to_yaml(given)
    assert yaml.safe_load(text)["env"]["options"] == {key: written}
    (tmp_path / "config.yaml").write_text(text)
    if "***" not in repr(written):
        assert load(tmp_path / "config.yaml").env.options == given.env.options
        return
    with pytest.raises(ConfigError, match=rf"env.options.{key}\S* = \*\*\*: a secret was removed"):
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
def test_secrets_in_an_address_are_redacted(address, written, tmp_path):
    text = to_yaml(load(LOCAL, [f"env.options.url={address}"]))
    assert yaml.safe_load(text)["env"]["options"]["url"] == written
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="env.options.url = .*a secret was removed"):
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
    text = to_yaml(load(LOCAL, [f"env.options.url={address}"]))
    assert yaml.safe_load(text)["env"]["options"]["url"] == address


def test_an_unset_variable_is_a_config_error():
    with pytest.raises(ConfigError) as error:
        load(LOCAL, ["env.options.api_key=${env:NO_SUCH_VARIABLE}"])
    (line,) = error.value.problems
    assert line == (
        "env.options.api_key = ${env:NO_SUCH_VARIABLE}: the environment variable NO_SUCH_VARIABLE "
        "is not set"
    )


# ---------------------------------------------------------------- W&B


LOG_A_ROW = f"""
import sys
from pathlib import Path
from megastep.config import load
from megastep.report.metrics_log import MetricsLog

config = load({LOCAL!r}, ["run.wandb_project=mine", "env.options.password={SECRET}"])
with MetricsLog.of_run(Path(sys.argv[1]), -1, config) as log:
    log.write(1, {{"train/loss": 1.0}})
"""


def test_an_api_key_alone_uploads_nothing(tmp_path):
    """A real wandb in its own process: with WANDB_API_KEY set it still writes files only."""
    folder = tmp_path / "r"
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_MODE"}
    environment["WANDB_API_KEY"] = "0" * 40
    done = subprocess.run(
        [sys.executable, "-c", LOG_A_ROW, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "uploaded" not in done.stdout, done.stderr
    (record,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    wait_for(lambda: b"mine" in record.read_bytes(), 60)  # wandb's own process writes it
    assert SECRET.encode() not in record.read_bytes()
    assert f"run-{(folder / 'wandb_id').read_text()}.wandb" == record.name


class Recorder:
    url = "https://there/mine/abc"
    id = "abc"

    def __init__(self, **given):
        self.given = given


@pytest.fixture
def started(monkeypatch):
    """wandb.init's arguments; uploading needs a server."""
    import wandb

    found = []
    monkeypatch.setattr(wandb, "init", lambda **given: found.append(given) or Recorder(**given))
    return found


def test_an_upload_is_reported_with_its_url(tmp_path, started, capsys):
    given = config(
        "run.wandb=online", "run.wandb_project=p", "run.wandb_entity=e", "run.wandb_id=mine"
    )
    MetricsLog.of_run(tmp_path, -1, given)
    line = "metrics and config are uploaded to W&B: https://there/mine/abc\n"
    assert capsys.readouterr().out == line
    (arguments,) = started
    wanted = {"project": "p", "entity": "e", "id": "mine", "mode": "online"}
    assert arguments.items() >= wanted.items()
    assert SECRET not in repr(arguments["config"])


def test_wandb_ids_are_unique_and_survive_a_resume(tmp_path):
    """Two runs of one name must not merge."""
    one = tmp_path / "a" / "same"
    two = tmp_path / "b" / "same"
    for folder in (one, two):
        folder.mkdir(parents=True)
    first = _wandb_id(one, is_new=True)
    assert first != _wandb_id(two, is_new=True)
    assert _wandb_id(one, is_new=False) == first  # resumed
    assert _wandb_id(one, is_new=True) != first  # restarted from scratch
