"""What an agent acts in: an environment plays one episode and is thrown away.

    env = find_env("chase")(row, **options)     one row of the data set, `env.options` of the config
    messages = await env.start()                the first prompt, as chat messages
    observation, reward, done, metrics, state = await env.step(text, ids)
    ...
    await env.close()                           always, whatever happened

`env.name` in a config is a built-in name, the name of an entry point of the group `megastep.envs` in any installed
package, or `module:Class` of anything importable. To write one, derive from `Env`:

    class Echo(Env):
        columns = {"word": str}                 what a row of the data set must have

        def __init__(self, row, *, polite=False):      keywords are the options
            self.word, self.polite = row["word"], polite

        async def start(self):
            return [{"role": "user", "content": f"Say {self.word}."}]

        async def step(self, text, ids):
            return Outcome(reward=float(text.strip() == self.word), done=True)

Blocking work belongs in a thread (`in_thread`): thousands of episodes share one event loop.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import entry_points
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megastep.types import Group

ENTRY_POINTS = "megastep.envs"
BUILT_IN = {
    "chase": "megastep.envs.chase:Chase",
    "guess": "megastep.envs.guess:Guess",
    "sql": "megastep.envs.sql:SQL",
    "search": "megastep.envs.search:Search",
    "skyrl": "megastep.envs.skyrl:SkyRL",
}

Message = dict[str, str]  # role, content; what a chat template takes


class EnvError(ValueError):
    """An environment that cannot be found or made, or that broke its protocol; one line."""


class Outcome(NamedTuple):
    """What a turn led to."""

    observation: list[Message] = []  # into the next prompt
    reward: float = 0.0  # of this turn; a trajectory's is the sum
    done: bool = False
    metrics: dict[str, Any] = {}  # JSON values; a later turn replaces an earlier one's of that name
    state: int | None = None  # names where the episode now stands, for estimators that compare such places


class Env(ABC):
    columns: ClassVar[dict[str, type]] = {}  # of a row of the data set, with their types; a row may have more

    def __init__(self, row: dict[str, Any]):
        self.row = row

    @abstractmethod
    async def start(self) -> list[Message]:
        """The first prompt."""

    @abstractmethod
    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        """`text` is what the model said, thinking included, without the token that ended it; `ids` are its tokens."""

    async def close(self) -> None:
        """Release what the episode held."""

    @classmethod
    def generate(cls, random: Random) -> dict[str, Any]:
        """A row drawn at random, for environments that need no data set (`data.train: generated`)."""
        raise EnvError(f"{cls.__name__} cannot generate episodes; give data.train a file")

    @classmethod
    def demonstrations(cls, count: int, seed: int, renderer: Any) -> list[Group]:
        """Episodes of somebody who knows how, rendered by `renderer.Renderer`: what a warm start trains on."""
        raise EnvError(f"{cls.__name__} has no demonstrations; write warm_start.trajectories: 0")


# ---------------------------------------------------------------- finding


def find_env(name: str) -> type[Env]:
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | BUILT_IN
    target = found.get(name, name if ":" in name else None)
    if target is None:
        raise EnvError(f"env.name = {name}: unknown; one of {', '.join(sorted(found))}, or module:Class")
    module, _, attribute = target.partition(":")
    try:
        env = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise EnvError(f"env.name = {name}: cannot be imported ({error})") from None
    if not (inspect.isclass(env) and issubclass(env, Env)):
        raise EnvError(f"env.name = {name}: {attribute} is no class derived from megastep.rollout.env.Env")
    return env


def check_options(env: type[Env], options: dict[str, Any]) -> None:
    parameters = list(inspect.signature(env).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    takes = f"it takes {', '.join(names)}" if names else "it takes none"
    for key in options:
        if key not in names:
            raise EnvError(f"env.options.{key}: {env.__name__} has no such option; {takes}")
    for p in parameters:
        if p.default is p.empty and p.name not in options:
            raise EnvError(f"env.options.{p.name}: must be given, {env.__name__} needs it")


# ---------------------------------------------------------------- trusting nothing


def checked_messages(messages: Any) -> list[Message]:
    ok = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not ok:
        raise EnvError(f"expected chat messages with role and content, got {_short(messages)}")
    return messages


def checked_outcome(outcome: Any) -> Outcome:
    """The outcome, if it is one that can be recorded."""
    if not isinstance(outcome, tuple) or len(outcome) < 3:
        raise EnvError(f"step() returned {_short(outcome)}; an Outcome is needed")
    outcome = Outcome(*outcome)
    checked_messages(outcome.observation)
    try:
        reward = float(outcome.reward)
        metrics = json.loads(json.dumps(dict(outcome.metrics), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise EnvError(f"step() returned reward {_short(outcome.reward)}, metrics {_short(outcome.metrics)}: "
                       f"{error}") from None
    if not math.isfinite(reward):
        raise EnvError(f"step() returned the reward {reward}")
    if outcome.state is not None and not isinstance(outcome.state, int):
        raise EnvError(f"step() returned the state {_short(outcome.state)}; an int is needed")
    return outcome._replace(reward=reward, done=bool(outcome.done), metrics=metrics)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


# ---------------------------------------------------------------- blocking work


async def in_thread(function: Callable, *arguments):
    """The result of a blocking call. Each has a thread of its own: one that never returns holds up neither another
    episode nor, being a daemon, the end of the program."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def run() -> None:
        try:
            finish, value = answer.set_result, function(*arguments)
        except Exception as error:
            finish, value = answer.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lambda: answer.done() or finish(value))

    threading.Thread(target=run, name="env", daemon=True).start()
    return await answer
