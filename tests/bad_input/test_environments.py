"""Environments: an invalid name, module or class is one line; invalid messages and outcomes fail
their trajectory only."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import megastep.trainer.loop  # noqa: F401  imported here, so that no case pays for it
from megastep.errors import DataError, EnvError
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.data import read_rows
from megastep.rollout.env import Env, Outcome, check_options, find_env
from megastep.rollout.generation import Sampling
from megastep.rollout.renderer import Renderer, load_tokenizer
from megastep.samples import store
from megastep.samples.metrics import rollout_metrics
from megastep.types import Group
from tests.rollout import chats

from .harness import CONFIG, check_lines, rejected, run

load_tokenizer("configs/models/chase")
ROOT = Path(megastep.__path__[0]).resolve().parent
SMALL = ("data.generated_rows=100", "warm_start.trajectories=0")

NAMES = [
    ":",
    "::",
    "x:",
    ":Y",
    ".x:Y",
    "..:Y",
    ".:Y",
    " ",
    "",
    "\t",
    "\n",
    "a\nb:C",
    "a:b:c",
    "a b:C",
    "a:b c",
    "1:2",
    "-x:Y",
    "megastep.envs.chase:",
    "megastep.envs.chase:nope",
    "megastep.envs.chase:target",
    "megastep.envs.chase:Chase.start",
    "megastep.envs.chase:Random",
    "megastep.rollout.env:Env",
    "megastep:Chase",
    "os:system",
    "os.path:join",
    "chase:Chase",
    "json:JSONDecoder",
    "no.such.module:Env",
    "megastep..envs:Chase",
    "import os:Y",
    "x" * 5000,
    "x" * 5000 + ":Y",
    "é:É",
    "\U0001f600:X",
    "None",
    "Chase",
    "CHASE",
    "env",
    "../chase:Chase",
    "/tmp/chase.py:Chase",
    "chase.py",
    "builtins:object",
    "builtins:int",
    "abc:ABC",
    "lambda:x",
    "class:Class",
]


def problem(name: str) -> str:
    """The error of `Task.load` for an environment, as the command prints it."""
    with pytest.raises((EnvError, DataError)) as error:
        env = find_env(name)
        check_options(env, {})
        read_rows("generated", env, 10, 0)
    lines = [f"error: {line}" for line in str(error.value).splitlines()]
    check_lines(lines)
    return lines[0]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_c12_names(name):
    assert problem(name).startswith("error: env.name = ")


@pytest.mark.parametrize(
    "name", [":", ".x:Y", " ", "", "a\nb:C", "megastep.envs.chase:target", "x" * 5000]
)
def test_c12_names_on_the_command_line(name):
    rejected("train", CONFIG, f"env.name={json.dumps(name)}", *SMALL, names="env.name")


HEAD = "from megastep.rollout.env import Env, EnvError, Outcome\n"
FULL = (
    HEAD
    + """
class Mine(Env):
    columns = {{"a": int}}
    {init}
    async def start(self): return [{{"role": "user", "content": "?"}}]
    {step}
    {more}
"""
)
GOOD_STEP = "async def step(self, text, ids): return Outcome(done=True)"


def mine(step=GOOD_STEP, more="", init="") -> str:
    return FULL.format(step=step, more=more, init=init)


MODULES = {
    "syntax": ("def (:\n", "SyntaxError"),
    "indentation": ("def f():\nreturn 1\n", "IndentationError"),
    "tabs": ("if 1:\n        a = 1\n\tb = 2\n", "TabError"),
    "latin": ("a = '\xe9'\n", "SyntaxError"),
    "null": ("a = 1\0", "null bytes"),
    "raises": ("1 / 0\n", "ZeroDivisionError: division by zero"),
    "asserts": ("assert False, 'no'\n", "AssertionError: no"),
    "many_lines": ("raise ValueError('\\n'.join(map(str, range(10000))))\n", "ValueError: 0 1 2"),
    "long": ("raise ValueError('x' * 10**6)\n", "ValueError: xxx"),
    "surrogate": ("raise ValueError('\\ud800')\n", "ValueError: \\ud800"),
    "mute": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n",
        "E: its text",
    ),
    "exits": ("import sys\nsys.exit()\n", "SystemExit"),
    "exits_0": ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    "exits_1": ("raise SystemExit('bye')\n", "SystemExit: bye"),
    "prints": ("print('hello')\nraise RuntimeError('x')\n", "RuntimeError: x"),
    "recursion": ("def f(): f()\nf()\n", "RecursionError"),
    "memory": ("raise MemoryError\n", "MemoryError"),
    "missing": ("import no_such_package\n", "No module named 'no_such_package'"),
    "missing_name": ("from megastep.rollout.env import Nothing\n", "cannot import name 'Nothing'"),
    "empty": ("", "has no attribute 'Mine'"),
    "wrong_case": (HEAD + "class mine(Env): pass\n", "has no attribute 'Mine'"),
    "function": ("def Mine(row): pass\n", "is no class derived from"),
    "instance": ("Mine = 5\n", "is no class derived from"),
    "none": ("Mine = None\n", "is no class derived from"),
    "no_base": ("class Mine: pass\n", "is no class derived from"),
    "module_getattr": ("def __getattr__(name): raise ValueError('odd')\n", "ValueError: odd"),
    "abstract": (
        HEAD + "class Mine(Env): pass\n",
        "lacks async def start(self) and async def step",
    ),
    "no_step": (
        HEAD + "class Mine(Env):\n    async def start(self): return []\n",
        "lacks async def step(self, text",
    ),
    "plain_step": (
        mine("def step(self, text, ids): return Outcome()"),
        "Mine.step is not async; write async def step",
    ),
    "plain_start": (
        mine(more="def start(self): return []"),
        "Mine.start is not async; write async def start(self)",
    ),
    "plain_close": (
        mine(more="def close(self): pass"),
        "Mine.close is not async; write async def close(self)",
    ),
    "generator": (mine("async def step(self, text, ids): yield 1"), "Mine.step is not async"),
    "one_argument": (
        mine("async def step(self, text): return Outcome()"),
        "Mine.step takes (self, text); write",
    ),
    "four_arguments": (
        mine("async def step(self, text, ids, x): return Outcome()"),
        "Mine.step takes",
    ),
    "columns_list": (mine(more="columns = ['a']"), "Mine.columns is ['a']; write {name: type}"),
    "columns_none": (mine(more="columns = None"), "Mine.columns is None"),
    "columns_names": (mine(more="columns = {'a': 'int'}"), "Mine.columns is {'a': 'int'}"),
    "columns_keys": (mine(more="columns = {1: int}"), "Mine.columns is {1: "),
    "no_signature": (
        mine(init="__init__ = type('Init', (), {'__call__': lambda *a: 1, '__signature__': 5})()"),
        "Mine.__init__: the class cannot be inspected, TypeError",
    ),
    "builtin_init": (
        mine(init="__init__ = dict.update"),
        "Mine.__init__: the class cannot be inspected, ",  # by the Python: ValueError or TypeError
    ),
    "metaclass": (
        HEAD
        + "class M(type(Env)):\n    def __getattr__(cls, name): raise RuntimeError('odd')\n"
        + mine().replace("(Env)", "(Env, metaclass=M)"),
        "the class cannot be inspected, RuntimeError: odd",
    ),
    "no_row": (mine(init="def __init__(self): pass"), "Mine takes no row"),
    "needs_option": (
        mine(init="def __init__(self, row, *, url): pass"),
        "env.options.url: must be given",
    ),
    "no_generate": (mine(), "Mine cannot generate episodes; give data.train a file"),
    "generate_raises": (
        mine(more="generate = classmethod(lambda cls, random: 1 / 0)"),
        "Mine.generate raised ZeroDivisionError",
    ),
    "generate_exits": (
        mine(more="generate = classmethod(lambda cls, random: exit(3))"),
        "Mine.generate raised SystemExit",
    ),
    "generate_none": (
        mine(more="generate = classmethod(lambda cls, random: None)"),
        "row 1: holds a NoneType",
    ),
    "generate_list": (
        mine(more="generate = classmethod(lambda cls, random: [1])"),
        "row 1: holds a list",
    ),
    "generate_text": (
        mine(more="generate = classmethod(lambda cls, random: 'a')"),
        "row 1: holds a str",
    ),
    "generate_empty": (
        mine(more="generate = classmethod(lambda cls, random: {})"),
        "row 1: column a is missing",
    ),
    "generate_kind": (
        mine(more="generate = classmethod(lambda cls, random: {'a': 'x'})"),
        "column a is 'x'; int is",
    ),
}


@pytest.mark.parametrize("module", MODULES)
def test_c12_modules(module, tmp_path, monkeypatch):
    source, message = MODULES[module]
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / f"bad_env_{module}.py").write_bytes(source.encode("latin-1"))
    assert message in problem(f"bad_env_{module}:Mine")


@pytest.mark.parametrize(
    "module", ["syntax", "exits_0", "prints", "plain_step", "generate_raises", "generate_kind"]
)
def test_c12_modules_next_to_the_config(module, tmp_path, monkeypatch):
    source, message = MODULES[module]
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"bad_own_{module}.py").write_text(source)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{path: {ROOT}/configs/models/chase, init: random}}\n"
        f"env: {{name: 'bad_own_{module}:Mine'}}\n"
        "engine: {max_model_len: 256}\nrollout: {max_response_tokens: 9}\n"
    )
    assert any(message in line for line in rejected("train", config, *SMALL))


ONE_GROUP = """
    @classmethod
    def demonstrations(cls, count, seed, renderer):
        import numpy as np
        from megastep.types import Group, Step, Trajectory
        ids = np.array([3, {token}], np.int32)
        step = Step(0, {last}, ids, ids, np.ones(2, bool), None, np.array([[0, 2]], np.int32))
        return [Group(0, [Trajectory(0, 0, [step])])]
"""
DEMONSTRATIONS = {
    "raises": (
        "lambda cls, *a: 1 / 0",
        "Mine.demonstrations raised ZeroDivisionError: division by zero",
    ),
    "exits": ("lambda cls, *a: exit(3)", "Mine.demonstrations raised SystemExit"),
    "arguments": ("lambda cls: []", "Mine.demonstrations raised TypeError"),
    "own_error": ("lambda cls, *a: (_ for _ in ()).throw(EnvError('not\\nnow'))", "error: not now"),
    "none": (
        "lambda cls, *a: None",
        "Mine.demonstrations returned None; a list of megastep.types.Group is needed",
    ),
    "nothing": ("lambda cls, *a: []", "Mine.demonstrations returned []; a list of"),
    "text": ("lambda cls, *a: ['x']", "Mine.demonstrations returned ['x']; a list of"),
    "hollow": (
        "lambda cls, *a: [__import__('megastep.types').types.Group(0, [None])]",
        "Mine.demonstrations returned groups that cannot be read: AttributeError",
    ),
    "not_last": (
        ONE_GROUP.format(token=3, last=False),
        "Mine.demonstrations: group 0, trajectory 0: steps marked",
    ),
    "token": (ONE_GROUP.format(token=640, last=True), "640"),
}


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_c12_demonstrations(name, tmp_path, monkeypatch):
    """Invalid demonstrations are an error before a process starts."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    made, message = DEMONSTRATIONS[name]
    more = "generate = classmethod(lambda cls, random: {'a': 1})\n    "
    more += made if "def " in made else f"demonstrations = classmethod({made})"
    (tmp_path / f"bad_demo_{name}.py").write_text(mine(more=more))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{path: {ROOT}/configs/models/chase, init: random}}\n"
        f"env: {{name: 'bad_demo_{name}:Mine'}}\n"
        "engine: {max_model_len: 256}\nrollout: {max_response_tokens: 9}\n"
    )
    (line,) = rejected(
        "train",
        config,
        "data.generated_rows=100",
        "warm_start.trajectories=2",
        f"run.dir={tmp_path}",
    )
    assert message in line


OPTIONS = [
    ("chase", "x=1", "env.options.x: Chase has no such option; it takes none"),
    ("guess", "number=1", "env.options.number: Guess has no such option; it takes numbers"),
    ("sql", "database=x", "env.options.database: SQL has no such option"),
    ("sql", "query_timeout_s=5", "env.options.databases: must be given"),
    ("search", "uri=http://x", "env.options.uri: Search has no such option"),
    ("skyrl", "name=x", "env.options.name: SkyRL has no such option"),
    ("chase", "row=1", "env.options.row: Chase has no such option"),
    ("chase", "self=1", "env.options.self: Chase has no such option"),
]


@pytest.mark.parametrize("name, option, message", OPTIONS)
def test_options(name, option, message):
    rejected("train", CONFIG, f"env.name={name}", f"env.options.{option}", *SMALL, names=message)


def test_e_environments_next_to_the_config_and_in_the_working_directory(tmp_path, monkeypatch):
    """They are found: the error is another one."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    base = tmp_path / "base"
    here = tmp_path / "here"
    own = tmp_path / "own"
    for folder, name in ((base, "env_of_base"), (here, "env_of_here"), (own, "env_of_own")):
        folder.mkdir()
        (folder / f"{name}.py").write_text(mine())
    (base / "base.yaml").write_text(
        f"model: {{path: {ROOT}/configs/models/chase, init: random}}\n"
        "engine: {max_model_len: 256}\nrollout: {max_response_tokens: 9}\n"
    )
    (own / "own.yaml").write_text("base: ../base/base.yaml\n")
    monkeypatch.chdir(here)
    for name in ("env_of_base", "env_of_here", "env_of_own"):
        result = run("train", own / "own.yaml", f"env.name={name}:Mine", *SMALL)
        assert result.lines == ["error: Mine cannot generate episodes; give data.train a file"], (
            result.err
        )
    rejected(
        "train",
        own / "own.yaml",
        "env.name=env_of_nobody:Mine",
        names="No module named 'env_of_nobody'",
    )


# ---------------------------------------------------------------- messages and outcomes

RENDERER = {mode: Renderer(chats.tokenizer("qwen3"), mode) for mode in ("tokens", "chat")}
LIMITS = Limits(
    max_turns=3,
    max_prompt_tokens=500,
    max_response_tokens=10,
    env_timeout_s=2.0,
    max_observation_chars=3000,
)
OK = [{"role": "user", "content": "ab?"}]


class Scripted(Env):
    def __init__(self, messages, outcome):
        self.messages = messages
        self.outcome = outcome

    async def start(self):
        return self.messages

    async def step(self, text, ids):
        return self.outcome


def group_of(env, mode) -> Group:
    """One episode as a group."""
    agent = Agent(
        chats.ScriptedEngine(RENDERER[mode], ["ab<|im_end|>"]),
        RENDERER[mode],
        LIMITS,
        Sampling(max_tokens=0),
    )
    return Group(0, [asyncio.run(agent.run_episode(lambda: env, 0, 0, "0/0"))])


def failure(env, mode, tmp_path) -> str:
    """The error of the failed trajectory, which metrics and rollout files accept."""
    group = group_of(env, mode)
    (trajectory,) = group.trajectories
    rollout_metrics([group])
    store.write(tmp_path / "rollout.safetensors", [group])
    assert trajectory.stop_reason == "env_error"
    error = trajectory.env_metrics["error"]
    assert "\n" not in error and len(error) < 400 and error.encode()
    return error


class Unprintable:
    def __repr__(self):
        raise ValueError

    def __float__(self):
        raise ValueError


MESSAGES = [
    None,
    5,
    "text",
    {},
    (),
    [],
    [None],
    [5],
    ["text"],
    [[]],
    [{}],
    [{"role": "user"}],
    [{"content": "x"}],
    Unprintable(),
    [Unprintable()],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": b"x"}],
    [{"role": "user", "content": ["x"]}],
    [{"role": None, "content": "x"}],
    [{"role": 5, "content": "x"}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "\ud800", "content": "x"}],
    [*OK, {"role": "user"}],
    [{"role": "user", "content": "x" * 3001}],
    [{"role": "x" * 3001, "content": ""}],
    [*OK * 1000],
    ({"role": "user", "content": "x"},),
    iter(OK),
    [{"role": "user", "content": Unprintable()}],
    [{"role": "user", "content": "\udcff" * 100}],
    [{"role": "user", "content": np.str_("x") + "\udfff"}],
    [{"role": "user", "content": [{"type": "image"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "x" * 3001}]}],
    [{"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "assistant", "tool_calls": "f()"}],
    [{"role": "assistant", "content": "", "tool_calls": [{}]}],
    [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 5}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
    [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": OK}}}] * 99,
        }
    ],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": b""}}}]}],
    [{"role": "tool", "content": "x", "tool_call_id": 5}],
    [{"role": "tool", "content": "x", "name": Unprintable()}],
]


@pytest.mark.parametrize("mode", ["tokens", "chat"])
@pytest.mark.parametrize("messages", MESSAGES, ids=range(len(MESSAGES)))
def test_c1_first_messages(messages, mode, tmp_path):
    failure(Scripted(messages, Outcome(done=True)), mode, tmp_path)


OUTCOMES = [
    None,
    5,
    "text",
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    [OK, 0.0, True],
    {"reward": 1},
    Unprintable(),
    (OK, 0, True, {}, None, 1),
    *[Outcome(observation=m) for m in MESSAGES if m != []],
    *[
        Outcome(OK, reward=r)
        for r in (
            None,
            "1",
            "x",
            b"1",
            float("nan"),
            float("inf"),
            -float("inf"),
            10**400,
            [],
            [1.0],
            {},
            1j,
            np.ones(2),
            np.float32("nan"),
            Unprintable(),
        )
    ],
    *[
        Outcome(OK, done=d)
        for d in (None, "no", "", [], {}, 0.5, np.ones(2), np.array([]), Unprintable())
    ],
    *[
        Outcome(OK, state=s)
        for s in (
            2**63,
            -(2**63) - 1,
            2**70,
            "s",
            b"s",
            1.0,
            [],
            (1,),
            Unprintable(),
            np.float32(1),
            np.ones(2),
        )
    ],
    *[
        Outcome(OK, metrics=m)
        for m in (
            None,
            5,
            "text",
            [1],
            [("a", Unprintable())],
            Unprintable(),
            {"x": Unprintable()},
            {"x": float("nan")},
            {"x": float("inf")},
            {"x": np.float64("nan")},
            {"x": np.ones(3)},
            {"x": 10**400},
            {"x": {1, 2}},
            {"x": b"1"},
            {"x": "\ud800"},
            {"\udfff": 1},
            {"x": "y" * 200_000},
            {"x": [float("nan")]},
            {"success": "no"},
            {"success": "yes"},
            {"success": ""},
            {"success": None},
            {"success": []},
            {"success": [True]},
            {"success": {}},
            {(1, 2): 3},
            {Unprintable(): 1},
            {"success": float("nan")},
        )
    ],
]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=range(len(OUTCOMES)))
def test_c10_outcomes(outcome, tmp_path):
    failure(Scripted(OK, outcome), "tokens", tmp_path)


def test_recursive_metrics(tmp_path):
    recursive = {}
    recursive["x"] = recursive
    failure(Scripted(OK, Outcome(OK, metrics=recursive)), "chat", tmp_path)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    failure(Scripted(OK, Outcome(OK, metrics={"x": deep})), "chat", tmp_path)
