"""Messages ↔ tokens. All use of chat templates is here.

A `Renderer` belongs to a tokenizer, a `History` to a trajectory:

    history = renderer.history(messages)
    history.prompt_ids                            the current prompt
    history.extend(response_ids, observation)     append the model's turn and the observation

`renderer.begin` and `history.add` are the same without the encoding, which `history.encode` does:
an event loop may run it in a thread.

`tokens`   Token in, token out. The next prompt is the last prompt, the sampled response, and the
           tokens that the template puts after a response: the observation and the generation
           prompt. No response is tokenized again, so every prompt extends the previous one.
`chat`     The whole conversation is rendered at each turn. Templates may rewrite history, as those
           of Qwen3 and gpt-oss do when they drop the thinking of earlier turns; responses become
           text and are tokenized again.

In both modes the response tokens of a step are the sampled ones.

The tokens after a response are found by rendering a conversation with a placeholder for the
response and keeping the text after the token that closes its turn. That token is special, so
splitting there cannot change the tokenization.

Text of environments cannot inject control tokens: `<|im_end|>` within a retrieved passage is
encoded as ten characters. A mark is inserted into each such string before the template is applied,
and the rendered text is split at the marks before it is encoded:

    observation     so <|im_end|> it is
    rendered        <|im_start|>user so <MARK|im_end|> it is<|im_end|>
    encoded         "<|im_start|>user so <" and "|im_end|> it is<|im_end|>", separately

Text without such strings is encoded as the tokenizer encodes the whole; encodings of its segments
are remembered (encoding.py). A vocabulary without the characters, such as one
of words, encodes them as its unknown token. Sampled control tokens stay control tokens; those that
the model spelled out as text stay text.
"""

import contextlib
import copy
import ctypes
import functools
import inspect
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megastep.errors import RenderError
from megastep.redaction import hide
from megastep.rollout.encoding import Encoder, any_of
from megastep.rollout.env import Message
from megastep.text import describe, one_line

TRIAL_S = 5.0  # time limit of all trial conversations
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PLACEHOLDER = "a" + secrets.token_hex(8)  # in no text, and not changed by trimming or escaping
_MARK = "b" + secrets.token_hex(8)
_USER = {"role": "user", "content": "?"}
_ASSISTANT = {"role": "assistant", "content": "?"}
_SYSTEM = {"role": "system", "content": "?"}
# A template must render one of these; it may reject the others.
_TRIALS = ([_USER, _ASSISTANT, _USER], [_SYSTEM, _USER, _ASSISTANT, _USER], [_USER])
_TRIAL_TURNS = (9, 200)  # of long trials: a template may loop over many turns
_LONG_TEXT = "? " * 1000
_TEMPLATE_ARGUMENTS = {"tools", "documents"}  # apply_chat_template passes them to the template
_CHANNEL = re.compile(
    r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|\Z)", re.DOTALL
)


def load_tokenizer(folder: str | Path, key: str = "model.path"):
    from transformers import AutoTokenizer

    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would create an empty tokenizer
        raise RenderError(
            f"{key} = {folder}: has no tokenizer; one of {', '.join(_TOKENIZER_FILES)} is needed"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of several libraries
        raise RenderError(
            f"{key} = {folder}: its tokenizer cannot be loaded ({describe(error)})"
        ) from None
    if not tokenizer.chat_template:
        raise RenderError(
            f"{key} = {folder}: its tokenizer has no chat template; add a chat_template.jinja"
        )
    if tokenizer.eos_token_id is None:
        raise RenderError(
            f"{key} = {folder}: its tokenizer has no eos_token; set one in tokenizer_config.json"
        )
    return tokenizer


class Renderer:
    def __init__(
        self,
        tokenizer,
        mode: str,
        options: dict[str, Any] | None = None,
        stop_ids: tuple[int, ...] = (),
    ):
        """`options`: arguments of the template, like enable_thinking; `stop_ids`: tokens that end a
        response, in addition to the tokenizer's eos."""
        self.tokenizer = tokenizer
        self.mode = mode
        self.options = options or {}
        self.encoder = Encoder(tokenizer)
        self.end_id: int = tokenizer.eos_token_id
        self.stop_ids = tuple(sorted({self.end_id, *stop_ids}))
        self._history_class = _HISTORIES[mode]
        self._has_channels = "<|channel|>" in tokenizer.get_vocab()
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        # Longest first: one may be a prefix of another.
        self._special = sorted(special, key=len, reverse=True)
        run_with_timeout(TRIAL_S, lambda: self._try_template(mode))

    @classmethod
    def for_model(
        cls, folder: str | Path, mode: str, options: dict[str, Any] | None = None
    ) -> "Renderer":
        tokenizer = load_tokenizer(folder)
        _check_options(tokenizer, options or {})
        stops = _generation_stops(Path(folder), max(tokenizer.get_vocab().values()))
        try:
            return cls(tokenizer, mode, options, stops)
        except RenderError as error:
            raise RenderError(f"model.path = {folder}: {error}") from None

    def _set_control(self, tokens: Iterable[str]) -> None:
        """Text of environments is not encoded as any of `tokens`."""
        control = [token for token in tokens if len(token) > 1]
        self._control = any_of(control)
        self._control_ids = set(self.tokenizer.convert_tokens_to_ids(control))

    def _try_template(self, mode: str) -> None:
        """RenderError for an unusable template. Finds turn delimiters that are not special tokens,
        such as DeepSeek's <｜User｜>; `<think>` is ordinary text unless it is a special token."""
        added = self.tokenizer.added_tokens_decoder.values()
        marked = {str(token) for token in added if token.special}
        control = {*self.tokenizer.all_special_tokens, *marked}
        self._set_control(control)
        problems = []
        for messages in _TRIALS:
            try:
                self.prompt_ids(messages)
                turns = self.render(messages, add_generation_prompt=False)
                break
            except RenderError as problem:
                problems.append(problem)
        else:
            raise problems[-1]
        delimiters = {token for token in self._special if token in turns}
        self._set_control(control | delimiters)
        if mode == "tokens":
            self.after_response([_USER])
        self._try_long(messages, mode)

    def _try_long(self, messages: list[Message], mode: str) -> None:
        """Long conversations and texts, for their run time; the template may reject them."""
        trials = [[*messages, *[_ASSISTANT, _USER] * turns] for turns in _TRIAL_TURNS]
        trials.append([{"role": "user", "content": _LONG_TEXT}])
        for trial in trials:
            with contextlib.suppress(RenderError):
                self.render(trial)
            if mode == "tokens":
                with contextlib.suppress(RenderError):
                    self.after_response(trial)

    def with_options(self, **options: Any) -> "Renderer":
        """The same renderer with more arguments of the template."""
        other = copy.copy(self)
        other.options = self.options | options
        return other

    def history(self, messages: list[Message]) -> "History":
        history = self.begin(messages)
        history.encode()
        return history

    def begin(self, messages: list[Message]) -> "History":
        return self._history_class(self, messages)

    def prompt_ids(self, messages: list[Message]) -> np.ndarray:
        """[P] i32: unquoted messages, and the generation prompt."""
        return self.encode(self.render(self.quoted(messages)))

    def quoted(self, value: Any) -> Any:
        """Environment messages with a mark inside each string that encodes as a control token."""
        if isinstance(value, str):
            while self._control.search(value):  # control tokens may overlap
                value = self._control.sub(lambda found: found[0][0] + _MARK + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {name: self.quoted(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self.quoted(part) for part in value]
        return value

    def after_response(self, observation: list[Message]) -> np.ndarray:
        """[n] i32: what the template puts after the end-of-turn token of a response."""
        return self.encode(self.text_after_response(observation))

    def after_tool_calls(self, calls: list[dict], observation: list[Message]) -> np.ndarray:
        """[n] i32: as `after_response`, for a template that rejects tool messages unless the turn
        before them has these calls."""
        named = [
            call | {"function": {"name": call["function"]["name"], "arguments": {"a": "b"}}}
            for call in self.quoted(calls)
        ]
        named[-1]["function"]["arguments"] = {_PLACEHOLDER: _PLACEHOLDER}
        response = {"role": "assistant", "content": "", "tool_calls": named}
        text = self.render([_USER, response, *self.quoted(observation)])
        _, found, rest = text.rpartition(_PLACEHOLDER)
        ends = [self.tokenizer.decode([id]) for id in self.stop_ids]
        places = [(rest.find(end), len(end)) for end in ends if end in rest]
        if not found or not places:
            raise RenderError("the chat template does not close a turn with tool calls")
        place, length = min(places)
        return self.encode(rest[place + length :])

    def text_after_response(self, observation: list[Message]) -> str:
        response = {"role": "assistant", "content": _PLACEHOLDER}
        text = self.render([_USER, response, *self.quoted(observation)])
        before, found, rest = text.partition(_PLACEHOLDER)
        closing = self._closing_token(rest)
        if not found or _PLACEHOLDER in rest or closing is None:
            excerpt = " ".join((rest if found else before)[:40].split())
            raise RenderError(
                "rollout.mode = tokens: the chat template does not close the model's turn with a "
                f"special token (found {excerpt!r}); write rollout.mode: chat"
            )
        return rest.lstrip()[len(closing) :]

    def _closing_token(self, after_turn: str) -> str | None:
        return next((t for t in self._special if after_turn.lstrip().startswith(t)), None)

    @functools.cached_property
    def _turn_end(self) -> str:
        """The token that ends a turn; raises RenderError if the template ends it with another."""
        response = {"role": "assistant", "content": _PLACEHOLDER}
        text = self.render([_USER, response], add_generation_prompt=False)
        closing = self._closing_token(text.partition(_PLACEHOLDER)[2])
        end: str = self.tokenizer.decode([self.end_id])
        if closing is not None and closing != end:
            raise RenderError(
                f"the chat template ends a turn with {closing}, and the tokenizer's eos_token is "
                f"{end}; set eos_token to {closing} in tokenizer_config.json"
            )
        return end

    def turn_ids(self, before: list[Message], turn: Message) -> np.ndarray:
        """[R] i32: an assistant message as the model would sample it, with its end-of-turn token.

        `before`: the messages that it follows. The content is what the model samples after the
        generation prompt; the template writes tool calls.
        """
        if self._has_channels:
            raise RenderError("a turn of a template with channels cannot be written from a message")
        end_token = self._turn_end
        text = turn["content"]
        if turn.get("tool_calls"):
            text = self._call_text(before, turn, end_token)
        return np.append(self.encode(text), np.int32(self.end_id))

    def _call_text(self, before: list[Message], turn: Message, end_token: str) -> str:
        """What the template writes between the generation prompt and the end of the turn."""
        messages = self.quoted([*before, turn])
        prompt = self.render(messages[:-1])
        whole = self.render(messages, add_generation_prompt=False)
        text, end, _ = whole.removeprefix(prompt).partition(end_token)
        names = [call["function"]["name"] for call in turn["tool_calls"]]
        if not whole.startswith(prompt) or not end or not all(name in text for name in names):
            raise RenderError("the chat template does not write tool calls")
        return text

    def call_opening(self, before: list[Message], name: str) -> str:
        """The beginning of a turn that calls the tool `name`, up to the name."""
        function = {"name": _PLACEHOLDER, "arguments": {}}
        call = {"id": _PLACEHOLDER, "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self._call_text(before, turn, self._turn_end)
        return text.partition(_PLACEHOLDER)[0] + name

    def text(self, response_ids: np.ndarray) -> str:
        """The decoded response, special tokens included, without its stop token."""
        return self.tokenizer.decode(self._without_end(response_ids), skip_special_tokens=False)

    def _without_end(self, response_ids: np.ndarray) -> list[int]:
        ids = response_ids.tolist()
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def message(self, response_ids: np.ndarray) -> dict[str, str]:
        """The response as a message; the analysis channel of gpt-oss becomes `thinking`.

        Templates like Qwen3's look for `</think>` in the content.
        """
        text = self._sampled_text(response_ids)
        channels = _CHANNEL.findall(text) if self._has_channels else []
        if not channels:
            return {"role": "assistant", "content": text}
        thinking = "".join(part for name, part in channels if name == "analysis")
        content = "".join(part for name, part in channels if name != "analysis")
        message = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        return message

    def _sampled_text(self, response_ids: np.ndarray) -> str:
        """The decoded response; a control token that was sampled as plain text is quoted."""
        text = self.text(response_ids)
        ids = self._without_end(response_ids)
        if len(self._control.findall(text)) == sum(id in self._control_ids for id in ids):
            return text
        pieces = []
        for is_control, run in groupby(ids, self._control_ids.__contains__):
            piece = self.tokenizer.decode(list(run), skip_special_tokens=False)
            pieces.append(piece if is_control else self.quoted(piece))
        return "".join(pieces)

    def render(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.options,
            )
        except Exception as error:  # a template is a program
            roles = hide(", ".join(m["role"] for m in messages))
            raise RenderError(
                f"the chat template rejects messages of {roles[:80]}: {one_line(error)}"
            ) from None

    def encode(self, text: str) -> np.ndarray:
        # The template has already added the special tokens.
        try:
            return np.concatenate([self.encoder.ids(piece) for piece in text.split(_MARK)])
        except Exception as error:
            reason = _encoding_problem(text, error)
            raise RenderError(f"the tokenizer rejects the text: {reason}") from None


class History:
    """A conversation: some token ids, and the text after them, which `encode` turns into ids."""

    prompt_ids: np.ndarray  # [P] i32

    def __init__(self, renderer: Renderer, messages: list[Message]):
        self.renderer = renderer
        self.messages = renderer.quoted(messages)
        self._ids = np.empty(0, np.int32)
        self._text = renderer.render(self.messages)

    def add(self, response_ids: np.ndarray, observation: list[Message]) -> None:
        raise NotImplementedError

    def encode(self) -> None:
        """Set `prompt_ids`."""
        self.prompt_ids = np.concatenate([self._ids, self.renderer.encode(self._text)])

    def extend(self, response_ids: np.ndarray, observation: list[Message]) -> None:
        self.add(response_ids, observation)
        self.encode()


class TokenHistory(History):
    def add(self, response_ids: np.ndarray, observation: list[Message]) -> None:
        """`response_ids` must end with an end-of-turn token."""
        self._ids = np.concatenate([self.prompt_ids, response_ids])
        self._text = self.renderer.text_after_response(observation)


class ChatHistory(History):
    def add(self, response_ids: np.ndarray, observation: list[Message]) -> None:
        self.messages += [self.renderer.message(response_ids), *self.renderer.quoted(observation)]
        self._text = self.renderer.render(self.messages)


_HISTORIES: dict[str, type[History]] = {"tokens": TokenHistory, "chat": ChatHistory}


def run_with_timeout(timeout_s: float, function: Callable[[], None]) -> None:
    """Call `function` in a thread; after the timeout, stop it by an exception and raise."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="template", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )
        raise RenderError(
            f"the chat template takes longer than {timeout_s:g} s for trial conversations; "
            "does it loop forever?"
        )
    if raised:
        raise raised[0]


def _check_options(tokenizer, options: dict[str, Any]) -> None:
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    reserved = {"messages", "conversations", *parameters} - _TEMPLATE_ARGUMENTS
    for name in options:
        if name in reserved:
            raise RenderError(
                f"rollout.template.{name}: not an argument of the template, "
                "every rendering sets it; remove it"
            )


def _generation_stops(folder: Path, largest: int) -> tuple[int, ...]:
    """Stop tokens of the model's generation_config.json; gpt-oss has several."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RenderError(f"{path}: not readable as JSON ({one_line(error)})") from None
    if not isinstance(content, dict):
        raise RenderError(f"{path}: holds a {type(content).__name__}; an object is needed")
    eos = content.get("eos_token_id")
    if eos is None:
        return ()
    ids = eos if isinstance(eos, list) else [eos]
    for id in ids:
        if type(id) is not int or not 0 <= id <= largest:
            raise RenderError(
                f"{path}: eos_token_id has {str(id)[:40]!r}; token ids of 0 to {largest} are needed"
            )
    return tuple(ids)


def _encoding_problem(text: str, error: Exception) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        return f"it has the lone surrogate {text[problem.start]!r}, which is not a character"
    return describe(error)
