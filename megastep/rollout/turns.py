"""Prompts of an agent's calls: a turn that the episode sampled keeps its tokens.

A request repeats the conversation so far as messages. The longest part of it that ends with a
sampled turn is a step's prompt and response, token by token; only what follows is rendered:

    request     user₁ assistant₁ tool₁ assistant₂ user₂
    sampled     user₁ → assistant₁                            step 0
                user₁ assistant₁ tool₁ → assistant₂           step 1: the longest
    prompt      tokens of step 1, then user₂ and the generation prompt

A sub-agent, a parallel call, a compacted history begin as other messages: they find another step,
or none and are rendered whole. With `rollout.mode: chat` the whole conversation is rendered at each
call, sampled turns from the text of their tokens, as by `renderer.ChatHistory`.

Messages are the same if their role, text, tool calls and names are: clients leave out reasoning,
and add fields of their own.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from megastep.errors import RenderError
from megastep.rollout.calls import parsed_arguments
from megastep.rollout.env import Message
from megastep.rollout.renderer import Renderer
from megastep.types import Step


@dataclass(frozen=True)
class Rendered:
    ids: np.ndarray  # [P] i32
    key: bytes  # identifies the conversation
    base: Step | None  # the step whose tokens begin the prompt
    opening: str = ""  # the beginning of the response, if a tool is forced: in `ids`


class SampledTurns:
    """The turns that one episode sampled, by the conversation that they end."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._steps: dict[bytes, Step] = {}
        self._texts: list[tuple[str, Step]] = []  # of calls with a text as prompt

    def prompt(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]],
        forced_tool: str | None = None,
    ) -> Rendered:
        """Raises RenderError for messages that the chat template or the tokenizer rejects."""
        renderer = self.renderer
        if tools:
            renderer = renderer.with_options(tools=renderer.quoted(tools))
        rendered = self._prompt(renderer, messages, tools)
        if forced_tool is None:
            return rendered
        opening = renderer.call_opening(messages, forced_tool)
        ids = np.concatenate([rendered.ids, renderer.encode(opening)])
        return Rendered(ids, rendered.key, rendered.base, opening)

    def _prompt(
        self, renderer: Renderer, messages: list[Message], tools: list[dict[str, Any]]
    ) -> Rendered:
        keys = _keys(messages, tools)
        sampled = {i: self._steps[key] for i, key in enumerate(keys) if key in self._steps}
        if renderer.mode == "chat":
            return Rendered(_whole(renderer, messages, sampled), keys[-1], None)
        if not sampled:
            return Rendered(renderer.prompt_ids(messages), keys[-1], None)
        last = max(sampled)
        base = sampled[last]
        following = _following(renderer, messages[last], messages[last + 1 :])
        ids = np.concatenate([base.prompt_ids, base.response_ids, following])
        return Rendered(ids, keys[-1], base)

    def add(self, rendered: Rendered, turn: Message, step: Step) -> None:
        """A step that sampled `turn` at the end of the conversation."""
        self._steps.setdefault(_next_key(rendered.key, turn), step)

    def text_prompt(self, text: str) -> Rendered:
        """A prompt that the agent wrote itself; control tokens in it are control tokens."""
        longest = max(
            ((whole, step) for whole, step in self._texts if text.startswith(whole)),
            key=lambda found: len(found[0]),
            default=None,
        )
        if longest is None:
            return Rendered(self.renderer.encoder.ids(text), text.encode(), None)
        whole, base = longest
        sampled = base.response_ids[: _sampled_tokens(base, self.renderer)]
        rest = self.renderer.encoder.ids(text[len(whole) :])
        return Rendered(np.concatenate([base.prompt_ids, sampled, rest]), text.encode(), base)

    def add_text(self, prompt: str, response: str, step: Step) -> None:
        self._texts.append((prompt + response, step))


def _sampled_tokens(step: Step, renderer: Renderer) -> int:
    """The response tokens without the end of the turn, which is not in its text."""
    count = len(step.response_ids)
    return count - 1 if count and step.response_ids[-1] in renderer.stop_ids else count


def _whole(renderer: Renderer, messages: list[Message], sampled: dict[int, Step]) -> np.ndarray:
    """The whole conversation, rendered; a sampled turn from its tokens."""
    turns = []
    for i, message in enumerate(messages):
        if i in sampled and not message.get("tool_calls"):
            turns.append(renderer.message(sampled[i].response_ids))
        else:  # the template writes tool calls
            turns.append(renderer.quoted(message))
    return renderer.encode(renderer.render(turns))


def _following(renderer: Renderer, turn: Message, messages: list[Message]) -> np.ndarray:
    try:
        return renderer.after_response(messages)
    except RenderError:
        if not turn.get("tool_calls"):
            raise
        return renderer.after_tool_calls(turn["tool_calls"], messages)


# ---------------------------------------------------------------- identity of conversations


def _keys(messages: list[Message], tools: list[dict[str, Any]]) -> list[bytes]:
    """Per message: a key of the conversation up to it and with it."""
    key = hashlib.blake2b(json.dumps(tools).encode()).digest()
    keys = []
    for message in messages:
        key = _next_key(key, message)
        keys.append(key)
    return keys


def _next_key(key: bytes, message: Message) -> bytes:
    content = message.get("content") or ""
    calls = [
        [call["function"]["name"], parsed_arguments(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or []
    ]
    is_answer = message["role"] == "assistant"
    same = [
        message["role"],
        content.strip() if is_answer else content,  # clients trim responses
        calls,
        message.get("tool_call_id"),
        message.get("name"),
    ]
    text = json.dumps(same, sort_keys=True)
    return hashlib.blake2b(key + text.encode(), digest_size=32).digest()
