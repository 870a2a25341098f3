"""D3: secrets of environments are named in the config, read at use, written nowhere; nothing is uploaded unasked."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import yaml

from megastep import paths, secrets
from megastep.config import ConfigError, load, to_yaml
from megastep.report import MetricsLog, _wandb_id
from megastep.rollout.data import Prompt
from megastep.rollout.env import Env, Outcome
from megastep.rollout.pool import Pool
from megastep.rundir import Run
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
    assert secrets.resolved(options) == {"api_key": SECRET, "nested": {"urls": [f"http://h/{SECRET}"]}}


def test_what_is_written_can_be_run_again(tmp_path):
    """The name of the variable stands in config.yaml, which is for its owner alone."""
    given = config(f"run.dir={tmp_path}", "run.name=r")
    Run.find(given, "r").create(given)
    written = tmp_path / "r" / "config.yaml"
    assert SECRET not in written.read_text() and written.stat().st_mode & 0o777 == 0o600
    assert load(written) == paths.absolute(given)


def test_an_environment_gets_the_value_and_its_errors_are_kept_free_of_it():
    """Real episodes: what an exception says goes into metrics and rollout files."""
    seen = []

    class Leaky(Env):
        def __init__(self, row, *, api_key: str):
            seen.append(api_key)

        async def start(self):
            raise RuntimeError(f"401: key {SECRET} was refused")

        async def step(self, action) -> Outcome:
            raise NotImplementedError

    async def unused(*_, **__):
        raise AssertionError("no model call is needed")

    pool = Pool(agent(unused), Leaky, 1, 1, {"api_key": "${env:LOOKUP_KEY}"})
    (group,) = asyncio.run(pool.run([Prompt(0, {})]))
    assert seen == [SECRET]
    assert group.trajectories[0].env_metrics["error"].count(secrets.HIDDEN) == 1
    assert SECRET not in repr(group)


def agent(generate):
    from megastep.rollout.agent import Agent, Limits
    from megastep.rollout.generation import Sampling
    from megastep.rollout.renderer import Renderer

    renderer = Renderer.for_model("configs/models/chase", "chat", {})
    return Agent(generate, renderer, Limits(2, 64, 8, 5.0), Sampling(max_tokens=8), seed="s")


@pytest.mark.parametrize("key", ["api_key", "apiKey", "API-KEY", "token", "hf_token", "password", "db_passwd", "secret",
                                 "client_secret", "access_key", "authorization", "credentials", "private_key"])
def test_values_under_such_keys_are_left_out(key, tmp_path):
    given = load(LOCAL, [f"env.options={json.dumps({key: SECRET, 'deep': [{key: SECRET}]})}"])
    assert SECRET not in to_yaml(given) and SECRET not in repr(secrets.redacted(asdict(given)))
    (tmp_path / "config.yaml").write_text(to_yaml(given))
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "config.yaml")
    assert error.value.problems[0].startswith(f"env.options.{key} = ***: a secret was left out when this file was")


@pytest.mark.parametrize("key", ["max_tokens", "tokens", "keyboard", "monkey", "key", "author", "stop"])
def test_values_under_other_keys_are_kept(key):
    assert yaml.safe_load(to_yaml(load(LOCAL, [f"env.options.{key}=plain"])))["env"]["options"] == {key: "plain"}


def test_a_password_in_an_address_is_left_out():
    written = to_yaml(load(LOCAL, ["env.options.url=https://me:pw1@host/x"]))
    assert "pw1" not in written and "https://***@host/x" in written


def test_a_variable_that_is_not_set_is_told_before_anything_starts():
    with pytest.raises(ConfigError) as error:
        load(LOCAL, ["env.options.api_key=${env:NO_SUCH_VARIABLE}"])
    (line,) = error.value.problems
    assert line == "env.options.api_key = ${env:NO_SUCH_VARIABLE}: the environment variable NO_SUCH_VARIABLE is not set"


# ---------------------------------------------------------------- W&B


def test_a_key_alone_uploads_nothing(tmp_path):
    """A real wandb in a process of its own: with WANDB_API_KEY set, files are written and nobody is called."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom megastep.config import load\n"
        "from megastep.report import MetricsLog\n"
        f"config = load({LOCAL!r}, ['run.wandb_project=mine', 'env.options.password={SECRET}'])\n"
        "with MetricsLog.of_run(Path(sys.argv[1]), -1, config) as log: log.write(1, {'train/loss': 1.0})"
    )
    folder = tmp_path / "r"
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_MODE"} | {"WANDB_API_KEY": "0" * 40}
    done = subprocess.run([sys.executable, "-c", script, folder], env=environment, capture_output=True, text=True,
                          timeout=120)
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
    given = config("run.wandb=online", "run.wandb_project=p", "run.wandb_entity=e", "run.wandb_id=mine")
    MetricsLog.of_run(tmp_path, -1, given)
    assert capsys.readouterr().out == "metrics and config are uploaded to W&B: https://there/mine/abc\n"
    (place,) = started
    assert (place["project"], place["entity"], place["id"], place["mode"]) == ("p", "e", "mine", "online")
    assert SECRET not in repr(place["config"])


def test_equal_names_never_merge_and_a_resumed_run_goes_on(tmp_path):
    one, two = tmp_path / "a" / "same", tmp_path / "b" / "same"
    for folder in (one, two):
        folder.mkdir(parents=True)
    first = _wandb_id(one, is_new=True)
    assert first != _wandb_id(two, is_new=True)
    assert _wandb_id(one, is_new=False) == first  # resumed
    assert _wandb_id(one, is_new=True) != first  # begun anew
