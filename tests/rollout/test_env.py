"""Environments are found by name, and told what they were not given."""

import asyncio
import subprocess
import sys
import time
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from megastep.rollout import env as env_module
from megastep.rollout.env import BUILT_IN, Env, EnvError, check_options, find_env, in_thread


class Echo(Env):
    columns = {"word": str}

    def __init__(self, row, *, times, polite=False):
        self.row = row

    async def start(self):
        return []

    async def step(self, text, ids):
        return None


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    assert issubclass(find_env(name), Env)


def test_by_module_and_class():
    assert find_env("tests.rollout.test_env:Echo") is Echo


def test_by_entry_point(monkeypatch):
    point = EntryPoint("echo", "tests.rollout.test_env:Echo", "megastep.envs")
    monkeypatch.setattr(env_module, "entry_points", lambda group: EntryPoints([point]).select(group=group))
    assert find_env("echo") is Echo
    with pytest.raises(EnvError, match="env.name = ecko: unknown; one of chase, echo, guess"):
        find_env("ecko")


@pytest.mark.parametrize("name, message", [
    ("chess", "env.name = chess: unknown; one of chase, guess, search, skyrl, sql, or module:Class"),
    ("no.such:Thing", "cannot be imported"),
    ("megastep.envs.chase:Nothing", "cannot be imported"),
    ("megastep.envs.chase:target", "target is no class derived from megastep.rollout.env.Env"),
])
def test_not_found(name, message):
    with pytest.raises(EnvError, match=message):
        find_env(name)


def test_options():
    check_options(Echo, {"times": 3})
    with pytest.raises(EnvError, match="env.options.loud: Echo has no such option; it takes times, polite"):
        check_options(Echo, {"times": 3, "loud": True})
    with pytest.raises(EnvError, match="env.options.times: must be given, Echo needs it"):
        check_options(Echo, {})
    with pytest.raises(EnvError, match="env.options.x: Chase has no such option; it takes none"):
        check_options(find_env("chase"), {"x": 1})


def test_blocking_calls_run_beside_each_other():
    async def run():
        begin = time.monotonic()
        answers = await asyncio.gather(*[in_thread(lambda i=i: time.sleep(0.2) or i) for i in range(50)])
        return answers, time.monotonic() - begin

    answers, took = asyncio.run(run())
    assert answers == list(range(50)) and took < 5
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(lambda: 1 / 0))


def test_a_call_that_never_returns_does_not_keep_the_program_from_ending():
    script = """
import asyncio, time
from megastep.rollout.env import in_thread
async def main():
    try:
        await asyncio.wait_for(in_thread(time.sleep, 600), 0.1)
    except TimeoutError:
        print("late")
asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr, run.returncode) == ("late\n", "", 0)
