"""Environments: one instance per episode.

    env = find_env("chase")(row, **options)     one row of the data set, `env.options` of the config
    messages = await env.start()                the first prompt, as chat messages
    observation, reward, done, metrics, state = await env.step(text, ids)
    ...
    await env.close()                           always, also after an error

`env.name` in a config is a built-in name, the name of an entry point of the group `megastep.envs`
in any installed package, or `module:Class` of anything importable. Modules in the config's folder
and in the working directory are importable. To write an environment, derive from `Env`:

    class Echo(Env):
        columns = {"word": str}                 required columns of a row

        def __init__(self, row, *, polite=False):      keywords are the options
            self.word = row["word"]
            self.polite = polite

        async def start(self):
            return [{"role": "user", "content": f"Say {self.word}."}]

        async def step(self, text, ids):
            return Outcome(reward=float(text.strip() == self.word), done=True)

Run blocking work in a thread (`in_thread`): thousands of episodes share one event loop.
"""

import contextlib
import importlib
import inspect
import json
import math
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megastep.errors import EnvError
from megastep.rollout import blocking
from megastep.text import describe, one_line, shorten
from megastep.types import Group

ENTRY_POINTS = "megastep.envs"
BUILT_IN = {
    "arithmetic": "megastep.envs.arithmetic:Arithmetic",
    "chase": "megastep.envs.chase:Chase",
    "guess": "megastep.envs.guess:Guess",
    "sql": "megastep.envs.sql:SQL",
    "search": "megastep.envs.search:Search",
    "skyrl": "megastep.envs.skyrl:SkyRL",
    "reasoning_gym": "megastep.envs.reasoning_gym:ReasoningGym",
    "textarena": "megastep.envs.textarena:TextArena",
}

# The methods of an environment, all async.
SIGNATURES = {"start": "(self)", "step": "(self, text, ids)", "close": "(self)"}
MAX_METRICS_CHARS = 100_000  # per outcome, as JSON
STATES = range(-(2**63), 2**63)  # int64, as in the columns of a rollout file
MAX_NAME_CHARS = 80  # of env.name in an error message

# Role and content, as a chat template takes them; also tool_calls, tool_call_id and name.
Message = dict[str, Any]


class Outcome(NamedTuple):
    """The result of one turn."""

    observation: list[Message] = []  # appended to the next prompt
    reward: float = 0.0  # of this turn; the trajectory's reward is the sum
    done: bool = False
    metrics: dict[str, Any] = {}  # JSON values; a later turn overwrites values of the same name
    state: int | None = None  # id of the environment's state, for estimators that compare states
    # Of an agent's calls by the id of their response, in addition to `reward` (docs/agents.md).
    step_rewards: dict[str, float] = {}


class Env(ABC):
    # Required columns of a row and their types; a row may have more.
    columns: ClassVar[dict[str, type]] = {}

    def __init__(self, row: dict[str, Any]):
        self.row = row

    @abstractmethod
    async def start(self) -> list[Message]:
        """The first prompt."""

    @abstractmethod
    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        """`text`: the decoded response with thinking, without its stop token; `ids`: its tokens."""

    async def close(self) -> None:  # noqa: B027  optional
        """Release the episode's resources."""

    @classmethod
    def generate(cls, random: Random) -> dict[str, Any]:
        """A random row, for environments without a data set (`data.train: generated`)."""
        raise EnvError(f"{cls.__name__} cannot generate episodes; give data.train a file")

    @classmethod
    def demonstrations(cls, count: int, seed: int, renderer: Any) -> list[Group]:
        """Expert episodes for the warm start, rendered by a `renderer.Renderer`."""
        raise EnvError(f"{cls.__name__} has no demonstrations; write warm_start.trajectories: 0")


# ---------------------------------------------------------------- loading


def import_from(folders: Iterable[Path]) -> None:
    """Append `folders` to sys.path: behind installed packages, so that they shadow none."""
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
    known = registered()
    target = known.get(name, name if ":" in name else None)
    readable = name.isprintable() and name.strip() == name != "" and len(name) <= MAX_NAME_CHARS
    setting = f"env.name = {name if readable else shorten(name)}"
    if target is None:
        raise EnvError(f"{setting}: unknown; one of {', '.join(sorted(known))}, or module:Class")
    module, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise EnvError(f"{setting}: is not of the form module:Class")
    env = _import(module, attribute, setting)
    if not (inspect.isclass(env) and issubclass(env, Env)):
        raise EnvError(f"{setting}: {attribute} is no class derived from megastep.rollout.env.Env")
    with _inspecting(setting):
        _check_class(env, setting)
    return env


@contextlib.contextmanager
def _inspecting(setting: str) -> Iterator[None]:
    """Turn whatever a metaclass or a descriptor raises during inspection into an EnvError."""
    try:
        yield
    except EnvError:
        raise
    except Exception as error:
        raise EnvError(f"{setting}: the class cannot be inspected, {describe(error)}") from None


def _import(module: str, attribute: str, setting: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise EnvError(f"{setting}: cannot be imported ({one_line(error)})") from None
    except (Exception, SystemExit) as error:  # importing runs the module's own code
        raise EnvError(
            f"{setting}: cannot be imported, {module} raised {describe(error)}"
        ) from None


def _check_class(env: type[Env], setting: str) -> None:
    """Check the methods and `columns` of a class without calling it."""
    if inspect.isabstract(env):
        missing = " and ".join(
            f"async def {name}{SIGNATURES[name]}" for name in sorted(env.__abstractmethods__)
        )
        raise EnvError(f"{setting}: {env.__name__} lacks {missing}")
    for name, signature in SIGNATURES.items():
        method = inspect.unwrap(getattr(env, name))
        if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
            raise EnvError(f"{setting}: {not_async(env, name)}")
        if inspect.isfunction(method) and not _takes(method, signature.count(",") + 1):
            raise EnvError(
                f"{setting}: {env.__name__}.{name} takes {inspect.signature(method)}; "
                f"write async def {name}{signature}"
            )
    columns = env.columns
    valid = isinstance(columns, dict) and all(
        isinstance(name, str) and inspect.isclass(kind) for name, kind in columns.items()
    )
    if not valid:
        raise EnvError(
            f"{setting}: {env.__name__}.columns is {shorten(columns)}; write {{name: type}}, "
            'such as {"question": str}'
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
    with _inspecting(f"env.name: {env.__name__}.__init__"):
        parameters = list(inspect.signature(env).parameters.values())
    if not any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters
    ):
        raise EnvError(f"env.name: {env.__name__} takes no row; write def __init__(self, row, ...)")
    option_parameters = parameters[1:]  # after the row
    if any(p.kind is p.VAR_KEYWORD for p in option_parameters):
        return
    names = [p.name for p in option_parameters]
    takes = f"it takes {', '.join(names)}" if names else "it takes none"
    for key in options:
        if key not in names:
            raise EnvError(f"env.options.{key}: {env.__name__} has no such option; {takes}")
    for p in option_parameters:
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in options:
            raise EnvError(f"env.options.{p.name}: must be given, {env.__name__} needs it")


# ---------------------------------------------------------------- validation of results


async def call_method(env: Env, method: str, *arguments) -> Any:
    """Await `env.METHOD(...)`; EnvError if the method is not async."""
    result = getattr(env, method)(*arguments)
    if not isinstance(result, Awaitable):
        raise EnvError(not_async(type(env), method))
    return await result


def checked_start(messages: Any, max_chars: int) -> list[Message]:
    messages = checked_messages(messages, max_chars)
    if not messages:
        raise EnvError("start() returned no messages; the first prompt is needed")
    return messages


def checked_messages(messages: Any, max_chars: int) -> list[Message]:
    """The messages with their content as text."""
    if not isinstance(messages, list):
        raise EnvError(f"expected chat messages with role and content, got {shorten(messages)}")
    checked = [_checked_message(message, messages) for message in messages]
    chars = sum(_chars(message) for message in checked)
    if chars > max_chars:
        # Not truncated: that would silently change the task.
        raise EnvError(
            f"messages of {chars} characters; rollout.max_observation_chars = {max_chars}"
        )
    return checked


def _checked_message(message: Any, messages: list) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise EnvError(f"expected chat messages with role and content, got {shorten(messages)}")
    calls = message.get("tool_calls")
    if calls is not None and not are_tool_calls(calls):
        raise EnvError(
            f"a message has tool_calls = {shorten(calls)}; "
            '[{"function": {"name": "...", "arguments": {...}}}] is needed'
        )
    for name in ("tool_call_id", "name"):
        if not isinstance(message.get(name, ""), str):
            raise EnvError(f"a message has {name} = {shorten(message[name])}; text is needed")
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list) and all(map(_is_text_part, content)):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise EnvError(f"expected chat messages with role and content, got {shorten(messages)}")
    return message if content is message.get("content") else message | {"content": content}


def are_tool_calls(calls: Any) -> bool:
    """Whether the value has the form of tool calls; their arguments are a JSON object or text."""
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        and isinstance(call["function"].get("arguments", {}), (dict, str))
        for call in calls
    )


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _chars(message: dict) -> int:
    texts = sum(len(text) for text in message.values() if isinstance(text, str))
    if not message.get("tool_calls"):
        return texts
    try:
        return texts + len(json.dumps(message["tool_calls"]))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(f"a message has tool_calls that are no JSON: {one_line(error)}") from None


def checked_outcome(returned: Any, max_chars: int) -> Outcome:
    """The outcome as plain Python values; EnvError where a rollout file could not store it."""
    if not isinstance(returned, tuple) or not 3 <= len(returned) <= len(Outcome._fields):
        raise EnvError(f"step() returned {shorten(returned)}; an Outcome is needed")
    outcome = Outcome(*returned)
    if outcome.step_rewards:
        raise EnvError("step() returned step_rewards; an environment's turns have rewards already")
    return Outcome(
        observation=checked_messages(outcome.observation, max_chars),
        reward=checked_reward(outcome.reward),
        done=_checked_done(outcome.done),
        metrics=checked_metrics(outcome.metrics),
        state=_checked_state(outcome.state),
    )


def checked_reward(reward: Any, who: str = "step()") -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # RuntimeError: a tensor with several elements
        number = math.nan
    if isinstance(reward, (str, bytes)) or not math.isfinite(number):
        raise EnvError(f"{who} returned the reward {shorten(reward)}; a finite number is needed")
    return number


def _checked_done(done: Any) -> bool:
    if not isinstance(done, (bool, int, np.bool_, np.integer)):
        raise EnvError(f"step() returned done = {shorten(done)}; True or False is needed")
    return bool(done)


def _checked_state(state: Any) -> int | None:
    if state is None:
        return None
    try:
        number = operator.index(state)
    except TypeError:
        raise EnvError(f"step() returned the state {shorten(state)}; an int is needed") from None
    if number not in STATES:
        raise EnvError(
            f"step() returned the state {shorten(state)}; it must fit 64 bits: "
            "take hash(...) % 2**63"
        )
    return number


def checked_metrics(metrics: Any, who: str = "step()") -> dict[str, Any]:
    try:
        text = json.dumps(dict(metrics), allow_nan=False, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(
            f"{who} returned the metrics {shorten(metrics)}: {one_line(error)}"
        ) from None
    if len(text) > MAX_METRICS_CHARS:
        raise EnvError(
            f"{who} returned metrics of {len(text)} characters; "
            f"at most {MAX_METRICS_CHARS} are recorded"
        )
    recorded = json.loads(text)
    if "\\ud" in text and (problem := lone_surrogate(recorded)):
        raise EnvError(f"{who} returned metrics that are not Unicode text: {problem}")
    for name, value in recorded.items():
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise EnvError(
                f"{who} returned the metric {name} = {shorten(value)}; it must fit a float"
            )
    success = recorded.get("success", True)
    if not isinstance(success, (bool, int, float)):
        raise EnvError(
            f"{who} returned the metric success = {shorten(success)}; "
            "True, False or a number is needed"
        )
    return recorded


def plain(value: Any) -> Any:
    """numpy scalars as Python's, for JSON."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def lone_surrogate(value: Any) -> str | None:
    """Report half of a UTF-16 pair in a JSON value; tokenizers and files cannot encode it."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        return f"it has the lone surrogate {error.object[error.start]!r}"
    return None


# ---------------------------------------------------------------- blocking work


async def in_thread(function: Callable, *arguments):
    """Await a blocking call in a thread (blocking.py): one that never returns blocks neither other
    episodes nor the end of the program."""
    return await blocking.calls.run(function, *arguments)
