"""The section `agent`: its short form, its checks, and that every setting reaches the pool."""

import asyncio
from pathlib import Path

import pytest
import yaml

from megastep.config import load, to_yaml
from megastep.errors import ConfigError, EnvError
from megastep.rollout.program import CommandProgram, FunctionProgram
from megastep.rollout.task import Task

CHASE = "configs/chase.yaml"
FUNCTION = "tests.rollout.agents:chase"
NO_ENV = "env.name=null"


def problems(*given: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(CHASE, given)
    return raised.value.problems


@pytest.mark.parametrize("written", [f"agent={FUNCTION}", f"agent.function={FUNCTION}"])
def test_the_short_form(written):
    config = load(CHASE, [NO_ENV, written])
    assert config.agent.function == FUNCTION and config.has_agent


def test_files(tmp_path):
    """The short form, and a path of a command relative to the file; both survive config.yaml."""
    base = {"model": {"path": str(Path("configs/models/bytes").resolve()), "init": "random"}}
    for agent, expected in (
        ("mine:solve", ("mine:solve", None)),
        ({"command": ["sh", "./go.sh", "x"]}, (None, ["sh", f"{tmp_path}/go.sh", "x"])),
    ):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(base | {"agent": agent, "engine": {"max_model_len": 512}}))
        config = load(path)
        assert (config.agent.function, config.agent.command) == expected
        copy = tmp_path / "copy.yaml"
        copy.write_text(to_yaml(config))
        assert load(copy).agent == config.agent


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            [f"agent={FUNCTION}"],
            "env.name = chase: an agent takes the place of the environment; remove one of the two",
        ),
        (
            [NO_ENV, f"agent={FUNCTION}", "agent.command=[sh]"],
            "agent.command = ['sh']: agent.function is given too; remove one of the two",
        ),
        ([NO_ENV, "agent=solve"], "agent.function = solve: is not of the form module:function"),
        ([NO_ENV, "agent=a-b:f"], "agent.function = a-b:f: is not of the form module:function"),
        ([NO_ENV, "agent.command=[]"], "agent.command = []: must begin with a program"),
        ([NO_ENV, "agent.command=['']"], "agent.command = ['']: must begin with a program"),
        (
            [NO_ENV, "agent.command=[sh]", "agent.environment=[NO_SUCH_VARIABLE]"],
            "agent.environment = NO_SUCH_VARIABLE: is not set",
        ),
        (
            [NO_ENV, "agent.command=[sh]", "agent.environment=[OPENAI_API_KEY]"],
            "agent.environment = OPENAI_API_KEY: is set by the endpoint",
        ),
        (
            [NO_ENV, "agent.command=[sh]", "agent.environment=['a b']"],
            "agent.environment = a b: is not the name of a variable",
        ),
        (["agent.timeout_s=0"], "agent.timeout_s = 0.0: must be more than 0"),
        (["agent=3"], "agent: is a section; give one of its keys"),
    ],
)
def test_each_error_has_its_line(given, line):
    assert any(found.startswith(line) for found in problems(*given)), problems(*given)


async def no_engine(*arguments, **named):
    raise RuntimeError


def test_every_setting_reaches_the_pool(monkeypatch):
    given = [
        NO_ENV,
        f"agent={FUNCTION}",
        "agent.timeout_s=7",
        "agent.max_tokens=99",
        "agent.roles=[planner]",
        "agent.tool_parser=hermes",
        "agent.reasoning_parser=none",
        "agent.host=127.0.0.2",
        "agent.max_body_mb=3",
        "rollout.temperature=0.5",
        "rollout.samples_per_prompt=3",
        "eval.temperature=0",
    ]
    task = Task.load(load(CHASE, given))
    assert task.train_rows[0].keys() == {"table", "hops", "key"}  # of the module's `generate`
    pool = task.pool(no_engine)
    assert isinstance(pool.program, FunctionProgram) and pool.timeout_s == 7
    assert (pool.model.max_tokens, pool.model.roles) == (99, ("planner",))
    assert pool.model.parsers.tool_parser == "hermes"
    assert pool.model.parsers.reasoning_parser is None
    assert (pool.model.limits.max_turns, pool.model.limits.max_prompt_tokens) == (5, 120)
    assert pool.model.sampling.temperature == 0.5 and pool.samples_per_prompt == 3
    assert task.eval_pool(no_engine).model.sampling.temperature == 0
    assert pool.model.seed != task.eval_pool(no_engine).model.seed

    async def address():
        async with pool.endpoint.session(None) as llm:
            return llm.base_url

    assert asyncio.run(address()).startswith("http://127.0.0.2:")
    assert pool.endpoint._max_body == 3 << 20
    monkeypatch.setenv("SOME_SETTING", "value")
    command = ["agent.command=[sh, -c, ls]", "agent.environment=[SOME_SETTING]"]
    task = Task.of_worker(load(CHASE, [NO_ENV, *command]))
    assert isinstance(task.program, CommandProgram)
    assert task.program.command.arguments == ("sh", "-c", "ls")
    assert task.program.command.environment == ("SOME_SETTING",)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["agent=no_such_module:f"], "agent.function = no_such_module:f: cannot be imported"),
        (["agent=json:no_such"], "agent.function = json:no_such: cannot be imported"),
        (["agent=json:dumps"], "write async def dumps(task, llm)"),
        (["agent=json:decoder"], "write async def decoder(task, llm)"),
        (["agent.command=[sh]"], "the agent generates no tasks; give a file"),
        (["agent=tests.rollout.agents:user"], "write async def user(task, llm)"),
    ],
)
def test_an_agent_that_cannot_be_used(given, error):
    with pytest.raises(EnvError) as raised:
        Task.load(load(CHASE, [NO_ENV, *given]))
    assert error in str(raised.value)


def test_an_unknown_parser():
    with pytest.raises(ConfigError, match="agent.tool_parser = hermit: vLLM has no such parser"):
        Task.load(load(CHASE, [NO_ENV, f"agent={FUNCTION}", "agent.tool_parser=hermit"]))
