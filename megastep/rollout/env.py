"""What an agent acts in: an environment plays one episode and is thrown away.

    env = find_env("chase")(row, **options)     one row of the data set, `env.options` of the config
    messages = await env.start()                the first prompt, as chat messages
    observation, reward, done, metrics, state = await env.step(text, ids)
    ...
    await env.close()                           always, whatever happened

`env.name` in a config is a built-in name, the name of an entry point of the group `megastep.envs` in any installed
package, or `module:Class` of anything importable; modules in the config's folder and in the working directory are. To
write one, derive from `Env`:

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
import operator
import reprlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megastep.errors import EnvError
from megastep.redaction import hide
from megastep.types import Group

ENTRY_POINTS = "megastep.envs"
BUILT_IN = {
    "chase": "megastep.envs.chase:Chase",
    "guess": "megastep.envs.guess:Guess",
    "sql": "megastep.envs.sql:SQL",
    "search": "megastep.envs.search:Search",
    "skyrl": "megastep.envs.skyrl:SkyRL",
}

SIGNATURES = {
    "start": "(self)",
    "step": "(self, text, ids)",
    "close": "(self)",
}  # all of them async
METRICS_CHARACTERS = 100_000  # of an outcome, as JSON
STATES = range(-(2**63), 2**63)  # what the columns of a rollout file hold

Message = dict[str, str]  # role, content; what a chat template takes


class Outcome(NamedTuple):
    """What a turn led to."""

    observation: list[Message] = []  # into the next prompt
    reward: float = 0.0  # of this turn; a trajectory's is the sum
    done: bool = False
    metrics: dict[str, Any] = {}  # JSON values; a later turn replaces an earlier one's of that name
    state: int | None = (
        None  # names where the episode now stands, for estimators that compare such places
    )


class Env(ABC):
    columns: ClassVar[
        dict[str, type]
    ] = {}  # of a row of the data set, with their types; a row may have more

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


def import_from(folders: Iterable[Path]) -> None:
    """Makes modules in these folders importable. They come last: none can take the place of an installed one."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)


def registered() -> dict[str, str]:
    """Name → module:Class, of entry points and built-in environments."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | BUILT_IN


def available() -> dict[str, str]:
    """Name → description, of every registered environment."""
    found = {}
    for name in sorted(registered()):
        try:
            env = find_env(name)
            text = env.__doc__ or sys.modules[env.__module__].__doc__ or ""
            found[name] = text.strip().partition("\n")[0]
        except EnvError as error:
            found[name] = str(error)
    return found


def find_env(name: str) -> type[Env]:
    found = registered()
    target = found.get(name, name if ":" in name else None)
    shown = f"env.name = {_shown(name)}"
    if target is None:
        raise EnvError(f"{shown}: unknown; one of {', '.join(sorted(found))}, or module:Class")
    module, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise EnvError(f"{shown}: is not of the form module:Class")
    env = _imported(module, attribute, shown)
    if not (inspect.isclass(env) and issubclass(env, Env)):
        raise EnvError(f"{shown}: {attribute} is no class derived from megastep.rollout.env.Env")
    with _inspected(shown):
        _check_class(env, shown)
    return env


@contextlib.contextmanager
def _inspected(shown: str) -> Iterator[None]:
    """A metaclass or a descriptor may raise anything when a class is looked at."""
    try:
        yield
    except EnvError:
        raise
    except Exception as error:
        raise EnvError(f"{shown}: the class cannot be inspected, {told(error)}") from None


def _imported(module: str, attribute: str, shown: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise EnvError(f"{shown}: cannot be imported ({one_line(error)})") from None
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        raise EnvError(f"{shown}: cannot be imported, {module} raised {told(error)}") from None


def _check_class(env: type[Env], shown: str) -> None:
    """What can be seen of a class before it is used."""
    if inspect.isabstract(env):
        missing = " and ".join(
            f"async def {name}{SIGNATURES[name]}" for name in sorted(env.__abstractmethods__)
        )
        raise EnvError(f"{shown}: {env.__name__} lacks {missing}")
    for name, signature in SIGNATURES.items():
        method = inspect.unwrap(getattr(env, name))
        if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
            raise EnvError(f"{shown}: {not_async(env, name)}")
        if inspect.isfunction(method) and not _takes(method, signature.count(",") + 1):
            raise EnvError(
                f"{shown}: {env.__name__}.{name} takes {inspect.signature(method)}; write async def "
                f"{name}{signature}"
            )
    columns = env.columns
    fits = isinstance(columns, dict) and all(
        isinstance(n, str) and inspect.isclass(k) for n, k in columns.items()
    )
    if not fits:
        raise EnvError(
            f"{shown}: {env.__name__}.columns is {short(columns)}; write {{name: type}}, such as "
            '{"question": str}'
        )


def _takes(method: Callable, arguments: int) -> bool:
    try:
        inspect.signature(method).bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def not_async(env: type[Env], method: str) -> str:
    return f"{env.__name__}.{method} is not async; write async def {method}{SIGNATURES[method]}"


def check_options(env: type[Env], options: dict[str, Any]) -> None:
    with _inspected(f"env.name: {env.__name__}.__init__"):
        parameters = list(inspect.signature(env).parameters.values())
    if not any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters
    ):
        raise EnvError(f"env.name: {env.__name__} takes no row; write def __init__(self, row, ...)")
    parameters = parameters[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    takes = f"it takes {', '.join(names)}" if names else "it takes none"
    for key in options:
        if key not in names:
            raise EnvError(f"env.options.{key}: {env.__name__} has no such option; {takes}")
    for p in parameters:
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in options:
            raise EnvError(f"env.options.{p.name}: must be given, {env.__name__} needs it")


# ---------------------------------------------------------------- trusting nothing


async def answer(env: Env, method: str, *arguments) -> Any:
    """`env.METHOD(...)`, which may have been written without async."""
    made = getattr(env, method)(*arguments)
    if not isinstance(made, Awaitable):
        raise EnvError(not_async(type(env), method))
    return await made


def checked_start(messages: Any, max_characters: int) -> list[Message]:
    messages = checked_messages(messages, max_characters)
    if not messages:
        raise EnvError("start() returned no messages; the first prompt is needed")
    return messages


def checked_messages(messages: Any, max_characters: int) -> list[Message]:
    ok = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not ok:
        raise EnvError(f"expected chat messages with role and content, got {short(messages)}")
    characters = sum(len(text) for m in messages for text in m.values() if isinstance(text, str))
    if characters > max_characters:
        # Not shortened: that would change the task, and nobody would know.
        raise EnvError(
            f"messages of {characters} characters; rollout.max_observation_chars = {max_characters}"
        )
    return messages


def checked_outcome(outcome: Any, max_characters: int) -> Outcome:
    """The outcome, if it is one that can be recorded."""
    if not isinstance(outcome, tuple) or not 3 <= len(outcome) <= len(Outcome._fields):
        raise EnvError(f"step() returned {short(outcome)}; an Outcome is needed")
    outcome = Outcome(*outcome)
    return Outcome(
        observation=checked_messages(outcome.observation, max_characters),
        reward=_checked_reward(outcome.reward),
        done=_checked_done(outcome.done),
        metrics=_checked_metrics(outcome.metrics),
        state=_checked_state(outcome.state),
    )


def _checked_reward(reward: Any) -> float:
    try:
        number = float(reward)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # the last one: of a tensor with several elements
        number = math.nan
    if isinstance(reward, (str, bytes)) or not math.isfinite(number):
        raise EnvError(f"step() returned the reward {short(reward)}; a finite number is needed")
    return number


def _checked_done(done: Any) -> bool:
    if not isinstance(done, (bool, int, np.bool_, np.integer)):
        raise EnvError(f"step() returned done = {short(done)}; True or False is needed")
    return bool(done)


def _checked_state(state: Any) -> int | None:
    if state is None:
        return None
    try:
        number = operator.index(state)
    except TypeError:
        raise EnvError(f"step() returned the state {short(state)}; an int is needed") from None
    if number not in STATES:
        raise EnvError(
            f"step() returned the state {short(state)}; it must fit 64 bits: take hash(...) % 2**63"
        )
    return number


def _checked_metrics(metrics: Any) -> dict[str, Any]:
    try:
        text = json.dumps(dict(metrics), allow_nan=False, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(f"step() returned the metrics {short(metrics)}: {one_line(error)}") from None
    if len(text) > METRICS_CHARACTERS:
        raise EnvError(
            f"step() returned metrics of {len(text)} characters; at most {METRICS_CHARACTERS} are recorded"
        )
    if "\\ud" in text and (where := lone_surrogate(json.loads(text))):
        raise EnvError(f"step() returned metrics that are no Unicode text: {where}")
    metrics = json.loads(text)
    for name, value in metrics.items():
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise EnvError(
                f"step() returned the metric {name} = {short(value)}; it must fit a float"
            )
    success = metrics.get("success", True)
    if not isinstance(success, (bool, int, float)):
        raise EnvError(
            f"step() returned the metric success = {short(success)}; True, False or a number is needed"
        )
    return metrics


def plain(value: Any) -> Any:
    """numpy's scalars as Python's own, for JSON."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def lone_surrogate(value: Any) -> str | None:
    """Half of a UTF-16 pair in one of the texts of a JSON value: no tokenizer and no file takes it."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        return f"it has the lone surrogate {error.object[error.start]!r}"
    return None


class _Repr(reprlib.Repr):
    """Hides secrets before it cuts."""

    def repr_str(self, text: str, level: int) -> str:
        return super().repr_str(hide(text), level)

    def repr_instance(self, value: Any, level: int) -> str:
        try:
            text = hide(repr(value))
        except Exception:  # then this one says what it is of
            return super().repr_instance(value, level)
        return text if len(text) <= self.maxother else text[: self.maxother - 3] + "..."


_REPR = _Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def short(value: Any) -> str:
    text = " ".join(_REPR.repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _shown(name: str) -> str:
    """As it was written, unless that cannot be read."""
    return (
        name
        if name.isprintable() and name.strip() == name != "" and len(name) <= 80
        else short(name)
    )


def told(error: BaseException) -> str:
    """An exception on one line, whatever it holds."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:
        text = f"its text cannot be had, {type(broken).__name__}"
    return " ".join(hide(text)[:1000].split())[:300].encode("utf-8", "backslashreplace").decode()


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
