"""A model call of an agent, whatever API it came through (openai_api.py, anthropic_api.py).

request ── translator ──► ModelCall ── Recording.answer ──► Answer ── translator ──► response
"""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megastep.rollout.env import Message
from megastep.text import shorten

MAX_MESSAGES = 4096
MAX_CHOICES = 64
MAX_STOPS = 16


class CallError(Exception):
    """A call that is not answered: an HTTP status and its reason, which the SDKs raise."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


def bad_request(message: str) -> CallError:
    return CallError(400, message)


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass
class ModelCall:
    """A checked request. None: the run's own value."""

    messages: list[Message] | None  # None: `prompt` is given
    prompt: str | np.ndarray | None = None  # text or token ids, for /v1/completions
    tools: list[dict[str, Any]] = field(default_factory=list)  # in OpenAI's form
    forced_tool: str | None = None  # the tool that the response must call
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    # Further sampling parameters of vLLM; a call that has any is not trained.
    extra: dict[str, Any] = field(default_factory=dict)
    choices: int = 1
    logprobs: bool = False
    role: str | None = None

    @property
    def chars(self) -> int:
        """What is rendered and encoded, roughly."""
        if self.messages is None:
            return len(self.prompt) if isinstance(self.prompt, str) else 0
        texts = sum(len(message["content"]) for message in self.messages)
        calls = sum(len(str(message.get("tool_calls", ""))) for message in self.messages)
        return texts + calls + len(str(self.tools))


@dataclass
class Choice:
    """One response to a call."""

    text: str  # without reasoning and tool calls
    reasoning: str
    tool_calls: list[ToolCall]
    finish: str  # stop | length | tool_calls
    stop: str | None  # the stop text that ended it
    tokens: list[str]  # text of each sampled token, if the call asks for logprobs
    ids: list[int]
    logprobs: list[float]


@dataclass
class Answer:
    id: str
    prompt_tokens: int
    cached_tokens: int
    choices: list[Choice]

    @property
    def response_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices)


# ---------------------------------------------------------------- reading JSON


def read_json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not readable as JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body is a {type(value).__name__}; a JSON object is needed")
    return value


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def number(body: dict[str, Any], key: str, low: float, high: float) -> float | None:
    """A number of the body from `low` to `high`; None if it is absent or null."""
    value = body.get(key)
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise bad_request(f"{key} is {shorten(value)}; a number from {low:g} to {high:g} is needed")
    return float(value)


def integer(body: dict[str, Any], key: str, low: int, high: int) -> int | None:
    """An integer of the body from `low` to `high`; None if it is absent or null."""
    value = body.get(key)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise bad_request(f"{key} is {shorten(value)}; an integer from {low} to {high} is needed")
    return value


def flag(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_request(f"{key} is {shorten(value)}; true or false is needed")
    return value


def stops(value: Any, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    valid = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not valid or len(texts) > MAX_STOPS:
        raise bad_request(f"{key} is {shorten(value)}; up to {MAX_STOPS} texts are needed")
    return tuple(texts)


def message_list(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages: a list of at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages: {len(messages)} of them; at most {MAX_MESSAGES} are rendered")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise bad_request(f"messages[{i}] is {shorten(message)}; an object is needed")
    return messages


def joined_text(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Text, or a list of text parts, as text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} is {shorten(content)}; text or a list of parts is needed")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise bad_request(f"{where} has a part of type {shorten(kind)}; the model reads text")
        text = part.get("text")
        if not isinstance(text, str):
            raise bad_request(f"{where} has a part without text")
        texts.append(text)
    return "\n".join(texts)


def parsed_arguments(arguments: Any) -> Any:
    """The arguments of a tool call as chat templates expect them: an object, if they are one."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
