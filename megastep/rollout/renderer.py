"""Messages ↔ tokens: the only code that knows chat templates.

A `Renderer` belongs to a tokenizer, a `History` to a trajectory:

    history = renderer.history(messages)
    history.prompt_ids                        what the model reads now
    history.extend(response_ids, observation)     the model's turn and what the environment said to it

`tokens`   Token in, token out. The next prompt is the last prompt, the response as it was sampled, and the tokens the
           template puts after a response: the observation and the call for the next turn. Nothing the model said is
           ever tokenized again, so every prompt extends the one before.
`chat`     The whole conversation is rendered anew each turn. Templates may rewrite history, as Qwen3's and gpt-oss's
           do when they drop the thinking of earlier turns; what was said becomes text and is tokenized again.

Either way the tokens of a step's response are those that were sampled.

The tokens after a response are found by rendering a conversation with a placeholder for the response and keeping what
follows the token that closes its turn. That token is special, so cutting there cannot change how text is split.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from megastep.rollout.env import Message

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PLACEHOLDER = "5f3a9c71e2"  # no template has it, and none would trim or escape it
_CHANNEL = re.compile(
    r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|\Z)", re.DOTALL
)


class RenderError(ValueError):
    """A tokenizer or a chat template that cannot be used so; one line."""


def load_tokenizer(folder: str | Path):
    from transformers import AutoTokenizer

    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would make an empty one
        raise RenderError(f"model.path = {folder}: has no tokenizer; one of {', '.join(_TOKENIZER_FILES)} is needed")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RenderError(f"model.path = {folder}: its tokenizer cannot be loaded ({_line(error)})") from None
    if not tokenizer.chat_template:
        raise RenderError(f"model.path = {folder}: its tokenizer has no chat template; add a chat_template.jinja")
    if tokenizer.eos_token_id is None:
        raise RenderError(f"model.path = {folder}: its tokenizer has no eos_token; set one in tokenizer_config.json")
    return tokenizer


class Renderer:
    def __init__(self, tokenizer, mode: str, options: dict[str, Any] | None = None, stop_ids: tuple[int, ...] = ()):
        """`options` are the template's, like enable_thinking; `stop_ids` end a response, as the tokenizer's eos."""
        self.tokenizer = tokenizer
        self.options = options or {}
        self.end_id: int = tokenizer.eos_token_id
        self.stop_ids = tuple(sorted({self.end_id, *stop_ids}))
        self._history = {"tokens": TokenHistory, "chat": ChatHistory}[mode]
        self._has_channels = "<|channel|>" in tokenizer.get_vocab()
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        self._special = sorted(special, key=len, reverse=True)  # longest first: one may begin as another does
        if mode == "tokens":
            self.after_response([{"role": "user", "content": "?"}])  # refuses a template that cannot, at once

    @classmethod
    def for_model(cls, folder: str | Path, mode: str, options: dict[str, Any] | None = None) -> "Renderer":
        return cls(load_tokenizer(folder), mode, options, _generation_stops(Path(folder)))

    def history(self, messages: list[Message]) -> "History":
        return self._history(self, messages)

    def prompt_ids(self, messages: list[Message]) -> np.ndarray:
        """[P] i32: the conversation and the call for the model's turn."""
        return self._encode(self._render(messages))

    def after_response(self, observation: list[Message]) -> np.ndarray:
        """[n] i32: what the template puts after the token that ends a response."""
        spoken = {"role": "assistant", "content": _PLACEHOLDER}
        text = self._render([{"role": "user", "content": "?"}, spoken, *observation])
        before, found, rest = text.partition(_PLACEHOLDER)
        closing = next((t for t in self._special if rest.lstrip().startswith(t)), None)
        if not found or _PLACEHOLDER in rest or closing is None:
            shown = " ".join((rest if found else before)[:40].split())
            raise RenderError(
                "rollout.mode = tokens: the chat template does not close the model's turn with a special token "
                f"(found {shown!r}); write rollout.mode: chat"
            )
        return self._encode(rest.lstrip()[len(closing) :])

    def text(self, response_ids: np.ndarray) -> str:
        """What was said, special tokens included, without the token that ended it."""
        ids = response_ids.tolist()
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def message(self, response_ids: np.ndarray) -> dict[str, str]:
        """What was said, as a template takes it: thinking apart where the model writes it to a channel of its own.

        Templates in the manner of Qwen3 find `</think>` in the content themselves.
        """
        text = self.text(response_ids)
        channels = _CHANNEL.findall(text) if self._has_channels else []
        if not channels:
            return {"role": "assistant", "content": text}
        thinking = "".join(said for name, said in channels if name == "analysis")
        content = "".join(said for name, said in channels if name != "analysis")
        return {"role": "assistant", "content": content} | ({"thinking": thinking} if thinking else {})

    def _render(self, messages: list[Message]) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.options
            )
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise RenderError(f"the chat template refuses messages of {roles}: {_line(error)}") from None

    def _encode(self, text: str) -> np.ndarray:
        # The template has written the special tokens already.
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)


class TokenHistory:
    def __init__(self, renderer: Renderer, messages: list[Message]):
        self.renderer = renderer
        self.prompt_ids = renderer.prompt_ids(messages)

    def extend(self, response_ids: np.ndarray, observation: list[Message]) -> None:
        """`response_ids` end with an end-of-turn token."""
        self.prompt_ids = np.concatenate([self.prompt_ids, response_ids, self.renderer.after_response(observation)])


class ChatHistory:
    def __init__(self, renderer: Renderer, messages: list[Message]):
        self.renderer = renderer
        self.messages = list(messages)
        self.prompt_ids = renderer.prompt_ids(self.messages)

    def extend(self, response_ids: np.ndarray, observation: list[Message]) -> None:
        self.messages += [self.renderer.message(response_ids), *observation]
        self.prompt_ids = self.renderer.prompt_ids(self.messages)


History = TokenHistory | ChatHistory


def _generation_stops(folder: Path) -> tuple[int, ...]:
    """Tokens that end a response by the model's generation_config.json, such as the several of gpt-oss."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    found = json.loads(path.read_text()).get("eos_token_id")
    return () if found is None else tuple(found) if isinstance(found, list) else (found,)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
