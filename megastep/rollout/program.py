"""Agent programs: episodes run by a function or a command that calls the model over HTTP.

    agent: my_agent:solve                        async def solve(task, llm) -> float or Outcome
    agent: {command: [python, my_agent.py]}      any program (commands.py)

The program gets a row of the data set and the address of the endpoint (endpoint.py); each of its
calls is recorded as a step (recording.py). How an episode ends, as `Trajectory.stop_reason`:

    DONE           the program returned its reward
    MAX_TURNS      it failed when it had made rollout.max_turns calls, or had sampled
                   agent.max_tokens tokens
    CONTEXT,       it failed when a prompt exceeded rollout.max_prompt_tokens; the latter if it was
    FIRST_PROMPT   the first
    ENV_ERROR      it raised, exited with another status than 0, returned an invalid result, or
                   made no call
    ENV_TIMEOUT    it took longer than agent.timeout_s
    ENGINE_ERROR   it failed after an engine did

The reward of the episode is that of its last step; `Outcome.step_rewards` adds to single calls.

Async functions run in one event loop in a thread of its own, plain functions in threads: one that
blocks does not block the endpoint that answers it.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from megastep import redaction
from megastep.config import AgentConfig
from megastep.errors import EnvError
from megastep.rollout import blocking
from megastep.rollout.commands import Command
from megastep.rollout.data import Prompt
from megastep.rollout.endpoint import LLM, Endpoint
from megastep.rollout.env import Env, Outcome, checked_metrics, checked_reward
from megastep.rollout.generation import Session
from megastep.rollout.pool import Pool
from megastep.rollout.recording import Model, Recording
from megastep.rollout.watch import warn
from megastep.samples.routing import drop_routing
from megastep.text import describe, one_line, shorten
from megastep.types import FAILED, FinishReason, StopReason, Trajectory

CANCEL_TIMEOUT_S = 5.0  # for a function to end after its cancellation
WHO = "the agent"


class Program(ABC):
    @abstractmethod
    async def run(self, task: dict[str, Any], llm: LLM) -> Any:
        """What the program returned. Cancelling this ends the program."""

    def generate(self, random: Random) -> dict[str, Any]:
        """A random row, for `data.train: generated`."""
        raise EnvError("data.train = generated: the agent generates no tasks; give a file")


def find_program(config: AgentConfig) -> Program:
    """Raises EnvError for a function that cannot be imported or called."""
    if config.command is not None:
        return CommandProgram(Command(tuple(config.command), tuple(config.environment)))
    assert config.function is not None
    return FunctionProgram(config.function)


class CommandProgram(Program):
    def __init__(self, command: Command):
        self.command = command

    async def run(self, task: dict[str, Any], llm: LLM) -> Any:
        result = await self.command.run(task, llm.variables())
        unknown = set(result) - {"reward", "metrics", "step_rewards"}
        if unknown:
            raise EnvError(f"the command's result has the unknown key {shorten(min(unknown))}")
        return Outcome(
            reward=result["reward"],
            metrics=result.get("metrics") or {},
            step_rewards=result.get("step_rewards") or {},
        )


class FunctionProgram(Program):
    def __init__(self, name: str):
        setting = f"agent.function = {name}"
        module_name, _, attribute = name.partition(":")
        try:
            module = importlib.import_module(module_name)
            self.function: Callable = getattr(module, attribute)
        except (ImportError, AttributeError) as error:
            raise EnvError(f"{setting}: cannot be imported ({one_line(error)})") from None
        except (Exception, SystemExit) as error:  # importing runs the module's own code
            raise EnvError(f"{setting}: cannot be imported, {describe(error)}") from None
        if not callable(self.function) or not _takes_two(self.function):
            raise EnvError(f"{setting}: write async def {attribute}(task, llm)")
        self._generate = getattr(module, "generate", None)

    async def run(self, task: dict[str, Any], llm: LLM) -> Any:
        if inspect.iscoroutinefunction(inspect.unwrap(self.function)):
            return await _in_agents_loop(self.function(task, llm))
        returned = await blocking.calls.run(self.function, task, llm)
        if inspect.iscoroutine(returned):  # of functools.partial, or of a callable object
            return await _in_agents_loop(returned)
        return returned

    def generate(self, random: Random) -> dict[str, Any]:
        return super().generate(random) if self._generate is None else self._generate(random)


def _takes_two(function: Callable) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def rows_of(program: Program) -> type[Env]:
    """What rollout/data.py asks of an environment, for an agent: any row, or generated ones."""

    class Agent(Env):
        async def start(self) -> list:
            raise NotImplementedError

        async def step(self, text: str, ids: Any) -> Outcome:
            raise NotImplementedError

        @classmethod
        def generate(cls, random: Random) -> dict[str, Any]:
            return program.generate(random)

    return Agent


# ---------------------------------------------------------------- functions


@functools.cache
def _agents_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all async functions of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop


async def _in_agents_loop(function: Coroutine) -> Any:
    own_loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    async def call() -> Any:
        try:
            return await function
        except SystemExit as error:  # it would end the event loop
            raise RuntimeError(describe(error)) from None
        finally:
            with contextlib.suppress(RuntimeError):  # the episodes' loop was closed meanwhile
                own_loop.call_soon_threadsafe(ended.set)

    running = asyncio.run_coroutine_threadsafe(call(), _agents_loop())
    try:
        return await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        running.cancel()
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await ended.wait()
        except TimeoutError:
            warn(f"{WHO}: ignored its cancellation and is abandoned")
        raise


# ---------------------------------------------------------------- episodes


class _End(NamedTuple):
    """How an episode ended."""

    stop_reason: StopReason
    outcome: Outcome = Outcome()
    error: str | None = None


@dataclass
class ProgramPool(Pool):
    """Episodes of an agent program, in this process."""

    model: Model
    program: Program
    endpoint: Endpoint
    timeout_s: float
    samples_per_prompt: int
    concurrency: int
    label: str = "rollout"
    keeps_routing: bool = True

    async def run_episode(self, prompt: Prompt, index: int) -> Trajectory:
        session = Session(f"{self.label}/{prompt.id}", index)
        recording = Recording(self.model, prompt.id, index, session)
        _reach_directly(self.endpoint.host)
        async with self.endpoint.session(recording) as llm:
            end = await self._run(prompt.row, llm, recording)
        trajectory = _trajectory(recording, end)
        trajectory.env_metrics = redaction.hidden(trajectory.env_metrics)
        return trajectory if self.keeps_routing else drop_routing(trajectory)

    async def _run(self, task: dict[str, Any], llm: LLM, recording: Recording) -> _End:
        """A failing program ends its own trajectory only."""
        try:
            async with asyncio.timeout(self.timeout_s) as clock:
                returned = await self.program.run(task, llm)
            return _End(StopReason.DONE, _checked(returned, recording))
        except TimeoutError as error:
            if not clock.expired():  # the program's own
                return _failure(recording, describe(error))
            limit = f"no result within agent.timeout_s = {self.timeout_s:g}"
            return _End(StopReason.ENV_TIMEOUT, error=limit)
        except EnvError as error:
            return _failure(recording, one_line(error, 2000))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            own = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and own is not None and own.cancelling():
                raise
            return _failure(recording, describe(error))


def _failure(recording: Recording, error: str) -> _End:
    """The last call may have been the cause."""
    if recording.exceeded is not None:
        return _End(recording.exceeded, error=error)
    if recording.engine_error is not None:
        return _End(StopReason.ENGINE_ERROR, error=f"{recording.engine_error}; then {error}")
    return _End(StopReason.ENV_ERROR, error=error)


def _checked(returned: Any, recording: Recording) -> Outcome:
    if not isinstance(returned, Outcome):
        returned = Outcome(reward=returned)
    if not recording.calls:
        raise EnvError(f"{WHO} made no call of the model")
    rewards = returned.step_rewards
    if not isinstance(rewards, dict):
        raise EnvError(f"{WHO} returned step_rewards = {shorten(rewards)}; {{id: number}}")
    known = {id for id, _, _ in recording.calls}
    for id in rewards:
        if id not in known:
            raise EnvError(f"{WHO} returned a reward for {shorten(id)}: no call has this id")
    return Outcome(
        reward=checked_reward(returned.reward, WHO),
        metrics=checked_metrics(returned.metrics, WHO),
        step_rewards={id: checked_reward(reward, WHO) for id, reward in rewards.items()},
    )


def _trajectory(recording: Recording, end: _End) -> Trajectory:
    for id, _, step in recording.calls:
        step.reward = end.outcome.step_rewards.get(id, 0.0)
    steps = recording.steps()
    if steps:
        last = steps[-1]
        last.reward += end.outcome.reward
        if end.stop_reason in FAILED:
            last.finish = FinishReason.ERROR
        elif end.stop_reason == StopReason.CONTEXT:
            last.finish = FinishReason.CONTEXT
    metrics = end.outcome.metrics | recording.metrics()
    if end.error is not None:
        metrics["error"] = end.error
    return Trajectory(
        recording.group_id,
        recording.index,
        steps,
        end.stop_reason,
        metrics,
        sampling=recording.model.sampling.distribution,
    )


def _reach_directly(host: str) -> None:
    """Clients in this process must not ask a proxy for the endpoint."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = os.environ.get(name, "")
        if host not in hosts.split(","):
            os.environ[name] = f"{hosts},{host}".strip(",")
