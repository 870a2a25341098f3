"""Environments are loaded by name; their class and options are checked."""

import asyncio
import functools
import subprocess
import sys
import time
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from megastep.errors import EnvError
from megastep.rollout import env as env_module
from megastep.rollout.env import (
    BUILT_IN,
    Env,
    Outcome,
    check_options,
    find_env,
    import_from,
    in_thread,
)


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
    monkeypatch.setattr(
        env_module, "entry_points", lambda group: EntryPoints([point]).select(group=group)
    )
    assert find_env("echo") is Echo
    with pytest.raises(
        EnvError, match="env.name = ecko: unknown; one of arithmetic, chase, echo, guess"
    ):
        find_env("ecko")


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "chess",
            "env.name = chess: unknown; one of arithmetic, chase, guess, reasoning_gym, search, "
            "skyrl, sql, textarena, or "
            "module:Class",
        ),
        ("no.such:Thing", "cannot be imported"),
        (":", "env.name = :: is not of the form module:Class"),
        (".x:Y", "env.name = .x:Y: is not of the form module:Class"),
        (" ", "env.name = ' ': unknown"),
        ("megastep.envs.chase:Nothing", "cannot be imported"),
        ("megastep.envs.chase:target", "target is no class derived from megastep.rollout.env.Env"),
    ],
)
def test_not_found(name, message):
    with pytest.raises(EnvError, match=message):
        find_env(name)


MODULES = {
    "syntax": ("def (:\n", "raised SyntaxError: invalid syntax"),
    "raises": ("1 / 0\n", "raised ZeroDivisionError: division by zero"),
    "exits": ("import sys\nsys.exit(3)\n", "raised SystemExit: 3"),
    "imports": ("import no_such_package\n", "No module named 'no_such_package'"),
    "lines": ("raise ValueError('a\\nb')\n", "raised ValueError: a b"),
}


@pytest.mark.parametrize("module", MODULES)
def test_c12_a_module_that_cannot_be_imported_is_one_line(module, tmp_path, monkeypatch):
    source, message = MODULES[module]
    (tmp_path / f"broken_{module}.py").write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(
        EnvError, match=f"^env.name = broken_{module}:Y: cannot be imported.*{message}"
    ) as error:
        find_env(f"broken_{module}:Y")
    assert "\n" not in str(error.value)


def made(name="Made", **members) -> type:
    async def start(self):
        return []

    async def step(self, text, ids):
        return Outcome()

    return type(name, (Env,), {"start": start, "step": step} | members)


async def few(self):
    return None


async def with_default(self, text, ids, more=None):
    return None


@pytest.mark.parametrize(
    "members, message",
    [
        (
            {"step": lambda self, text, ids: None},
            r"Made.step is not async; write async def step\(self, text, ids\)",
        ),
        ({"start": lambda self: []}, r"Made.start is not async; write async def start\(self\)"),
        ({"close": lambda self: None}, r"Made.close is not async; write async def close\(self\)"),
        ({"step": few}, r"Made.step takes \(self\); write async def step\(self, text, ids\)"),
        ({"columns": ["question"]}, r"Made.columns is \['question'\]; write {name: type}"),
        ({"columns": {"question": "str"}}, "Made.columns is .*; write {name: type}"),
    ],
)
def test_c10_the_error_for_an_invalid_class_shows_what_to_write(members, message, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Made", made(**members), raising=False)
    with pytest.raises(EnvError, match=message):
        find_env(f"{__name__}:Made")


def test_c10_methods_with_defaults_or_wrappers_are_accepted(monkeypatch):
    def wrapped(method):
        @functools.wraps(method)
        def call(*arguments):
            return method(*arguments)

        return call

    env = made(step=with_default, start=wrapped(Echo.start))
    monkeypatch.setattr(sys.modules[__name__], "Made", env, raising=False)
    assert find_env(f"{__name__}:Made") is env


def test_c10_a_class_without_its_methods(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Made", type("Made", (Env,), {}), raising=False)
    with pytest.raises(
        EnvError, match=r"Made lacks async def start\(self\) and async def step\(self, text, ids\)"
    ):
        find_env(f"{__name__}:Made")
    with pytest.raises(EnvError, match="NoRow takes no row; write def __init__"):
        check_options(made("NoRow", __init__=lambda self: None), {})


def test_e_own_modules_are_importable_and_shadow_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = "from tests.rollout.test_env import Echo\nclass Mine(Echo): pass\n"
    (tmp_path / "own_env_module.py").write_text(source)
    (tmp_path / "wave.py").write_text("raise ValueError")  # a name of the standard library
    sys.modules.pop("wave", None)
    with pytest.raises(EnvError, match="No module named 'own_env_module'"):
        find_env("own_env_module:Mine")
    import_from([tmp_path, tmp_path])
    assert find_env("own_env_module:Mine").__name__ == "Mine" and sys.path.count(str(tmp_path)) == 1
    with pytest.raises(EnvError, match="Wave_read is no class derived"):
        find_env("wave:Wave_read")


def test_options():
    check_options(Echo, {"times": 3})
    with pytest.raises(
        EnvError, match="env.options.loud: Echo has no such option; it takes times, polite"
    ):
        check_options(Echo, {"times": 3, "loud": True})
    with pytest.raises(EnvError, match="env.options.times: must be given, Echo needs it"):
        check_options(Echo, {})
    with pytest.raises(EnvError, match="env.options.x: Chase has no such option; it takes none"):
        check_options(find_env("chase"), {"x": 1})


def test_blocking_calls_run_concurrently():
    async def run():
        begin = time.monotonic()
        answers = await asyncio.gather(
            *[in_thread(lambda i=i: time.sleep(0.2) or i) for i in range(50)]
        )
        return answers, time.monotonic() - begin

    answers, took = asyncio.run(run())
    assert answers == list(range(50)) and took < 5
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(lambda: 1 / 0))


def test_a_call_that_never_returns_does_not_block_the_end_of_the_program():
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
    assert (run.stdout, run.returncode) == ("late\n", 0)
    assert (
        run.stderr
        == "warning: sleep: still runs after its time limit; another thread replaces its own\n"
    )
