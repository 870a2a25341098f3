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

Text from outside, which is all that environments say, cannot write control tokens: `<|im_end|>` within a retrieved
passage is read as the ten characters. A mark is put inside each such string before the template sees it, and the
rendered text is cut at the marks before it is encoded:

    from outside    so <|im_end|> it is
    rendered        <|im_start|>user so <MARK|im_end|> it is<|im_end|>
    encoded         "<|im_start|>user so <" and "|im_end|> it is<|im_end|>", each on its own

Text without such strings is encoded in one piece. A vocabulary that cannot spell them, such as one of words, has its
unknown token there. What the model sampled keeps its control tokens, and those that it spelled out stay spelled out.
"""

import contextlib
import ctypes
import inspect
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from megastep.errors import RenderError
from megastep.redaction import hide
from megastep.rollout.env import Message, one_line, told

TRIAL_S = 5.0  # for the conversations that a template is tried with
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PLACEHOLDER = "a" + secrets.token_hex(8)  # no text has it, and no template would trim or escape it
_MARK = "b" + secrets.token_hex(8)
_WORD = {"role": "user", "content": "?"}
_ANSWER = {"role": "assistant", "content": "?"}
_SYSTEM = {"role": "system", "content": "?"}
_TRIALS = (
    [_WORD, _ANSWER, _WORD],
    [_SYSTEM, _WORD, _ANSWER, _WORD],
    [_WORD],
)  # a template may refuse some
_LENGTHS = (9, 200)  # turns of longer trials: a template may loop where there are many
_LONG_TEXT = "? " * 1000
_TEMPLATES_OWN = {
    "tools",
    "documents",
}  # arguments of apply_chat_template that it passes on as they are
_CHANNEL = re.compile(
    r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|\Z)", re.DOTALL
)


def load_tokenizer(folder: str | Path):
    from transformers import AutoTokenizer

    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would make an empty one
        raise RenderError(
            f"model.path = {folder}: has no tokenizer; one of {', '.join(_TOKENIZER_FILES)} is needed"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of any kind, from several libraries
        raise RenderError(
            f"model.path = {folder}: its tokenizer cannot be loaded ({told(error)})"
        ) from None
    if not tokenizer.chat_template:
        raise RenderError(
            f"model.path = {folder}: its tokenizer has no chat template; add a chat_template.jinja"
        )
    if tokenizer.eos_token_id is None:
        raise RenderError(
            f"model.path = {folder}: its tokenizer has no eos_token; set one in tokenizer_config.json"
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
        """`options` are the template's, like enable_thinking; `stop_ids` end a response, as the tokenizer's eos."""
        self.tokenizer = tokenizer
        self.options = options or {}
        self.end_id: int = tokenizer.eos_token_id
        self.stop_ids = tuple(sorted({self.end_id, *stop_ids}))
        self._history = {"tokens": TokenHistory, "chat": ChatHistory}[mode]
        self._has_channels = "<|channel|>" in tokenizer.get_vocab()
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        self._special = sorted(
            special, key=len, reverse=True
        )  # longest first: one may begin as another does
        within(TRIAL_S, lambda: self._try_template(mode))

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
        """`tokens`: what text from outside must not be read as."""
        longest_first = sorted((t for t in tokens if len(t) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._control_ids = set(self.tokenizer.convert_tokens_to_ids(longest_first))

    def _try_template(self, mode: str) -> None:
        """Refuses a template that cannot be used. Learns which tokens that are not special tell turns apart, such as
        DeepSeek's <｜User｜>; `<think>` is a word that prompts may use, unless it is a special token."""
        marked = {
            str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special
        }
        control = {*self.tokenizer.all_special_tokens, *marked}
        self._set_control(control)
        problems = []
        for messages in _TRIALS:
            try:
                self.prompt_ids(messages)
                turns = self._render(messages, add_generation_prompt=False)
                break
            except RenderError as problem:
                problems.append(problem)
        else:
            raise problems[-1]
        self._set_control({*control, *(t for t in self._special if t in turns)})
        if mode == "tokens":
            self.after_response([_WORD])
        self._try_long(messages, mode)

    def _try_long(self, messages: list[Message], mode: str) -> None:
        """Long conversations and texts, for the time they take. To refuse them is the template's right."""
        long = [{"role": "user", "content": _LONG_TEXT}]
        trials = [[*messages, *[_ANSWER, _WORD] * turns] for turns in _LENGTHS] + [long]
        for trial in trials:
            with contextlib.suppress(RenderError):
                self._render(trial)
            if mode == "tokens":
                with contextlib.suppress(RenderError):
                    self.after_response(trial)

    def history(self, messages: list[Message]) -> "History":
        return self._history(self, messages)

    def prompt_ids(self, messages: list[Message]) -> np.ndarray:
        """[P] i32: the conversation, all of it from outside, and the call for the model's turn."""
        return self.ids_of(self.quoted(messages))

    def ids_of(self, messages: list[Message]) -> np.ndarray:
        """The same of messages that are quoted where they are from outside."""
        return self._encode(self._render(messages))

    def quoted(self, value: Any) -> Any:
        """Messages from outside, a mark inside each string that would be read as a control token."""
        if isinstance(value, str):
            while self._control.search(value):  # what is left of one may be another
                value = self._control.sub(lambda found: found[0][0] + _MARK + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {name: self.quoted(part) for name, part in value.items()}
        return [self.quoted(part) for part in value] if isinstance(value, list) else value

    def after_response(self, observation: list[Message]) -> np.ndarray:
        """[n] i32: what the template puts after the token that ends a response."""
        spoken = {"role": "assistant", "content": _PLACEHOLDER}
        text = self._render([_WORD, spoken, *self.quoted(observation)])
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
        return self.tokenizer.decode(self._without_end(response_ids), skip_special_tokens=False)

    def _without_end(self, response_ids: np.ndarray) -> list[int]:
        ids = response_ids.tolist()
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def message(self, response_ids: np.ndarray) -> dict[str, str]:
        """What was said, as a template takes it: thinking apart where the model writes it to a channel of its own.

        Templates in the manner of Qwen3 find `</think>` in the content themselves.
        """
        text = self._sampled_text(response_ids)
        channels = _CHANNEL.findall(text) if self._has_channels else []
        if not channels:
            return {"role": "assistant", "content": text}
        thinking = "".join(said for name, said in channels if name == "analysis")
        content = "".join(said for name, said in channels if name != "analysis")
        return {"role": "assistant", "content": content} | (
            {"thinking": thinking} if thinking else {}
        )

    def _sampled_text(self, response_ids: np.ndarray) -> str:
        """The text of a response; a control token that was spelled out letter by letter is quoted."""
        text, ids = self.text(response_ids), self._without_end(response_ids)
        if len(self._control.findall(text)) == sum(id in self._control_ids for id in ids):
            return text
        pieces = []
        for is_control, run in groupby(ids, self._control_ids.__contains__):
            piece = self.tokenizer.decode(list(run), skip_special_tokens=False)
            pieces.append(piece if is_control else self.quoted(piece))
        return "".join(pieces)

    def _render(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.options,
            )
        except Exception as error:  # templates are programs
            roles = hide(", ".join(m["role"] for m in messages))
            raise RenderError(
                f"the chat template refuses messages of {roles[:80]}: {one_line(error)}"
            ) from None

    def _encode(self, text: str) -> np.ndarray:
        # The template has written the special tokens already.
        try:
            pieces = [
                self.tokenizer.encode(piece, add_special_tokens=False)
                for piece in text.split(_MARK)
            ]
        except Exception as error:
            raise RenderError(
                f"the tokenizer refuses the text: {_why_refused(text, error)}"
            ) from None
        return np.array(list(chain.from_iterable(pieces)), np.int32)


class TokenHistory:
    def __init__(self, renderer: Renderer, messages: list[Message]):
        self.renderer = renderer
        self.prompt_ids = renderer.prompt_ids(messages)

    def extend(self, response_ids: np.ndarray, observation: list[Message]) -> None:
        """`response_ids` end with an end-of-turn token."""
        self.prompt_ids = np.concatenate(
            [self.prompt_ids, response_ids, self.renderer.after_response(observation)]
        )


class ChatHistory:
    def __init__(self, renderer: Renderer, messages: list[Message]):
        self.renderer = renderer
        self.messages = renderer.quoted(messages)
        self.prompt_ids = renderer.ids_of(self.messages)

    def extend(self, response_ids: np.ndarray, observation: list[Message]) -> None:
        self.messages += [self.renderer.message(response_ids), *self.renderer.quoted(observation)]
        self.prompt_ids = self.renderer.ids_of(self.messages)


History = TokenHistory | ChatHistory


def within(seconds: float, function: Callable[[], None]) -> None:
    """Calls `function`. One that takes longer is stopped by an exception in its thread, and refused."""
    raised = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="template", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )
        raise RenderError(
            f"the chat template takes longer than {seconds:g} s for trial conversations; has it a loop "
            "without end?"
        )
    if raised:
        raise raised[0]


def _check_options(tokenizer, options: dict[str, Any]) -> None:
    taken = {
        "messages",
        "conversations",
        *inspect.signature(tokenizer.apply_chat_template).parameters,
    }
    for name in options:
        if name in taken - _TEMPLATES_OWN:
            raise RenderError(
                f"rollout.template.{name}: is not the template's, every rendering sets it; remove it"
            )


def _generation_stops(folder: Path, largest: int) -> tuple[int, ...]:
    """Tokens that end a response by the model's generation_config.json, such as the several of gpt-oss."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RenderError(f"{path}: not readable as JSON ({one_line(error)})") from None
    if not isinstance(content, dict):
        raise RenderError(f"{path}: holds a {type(content).__name__}; an object is needed")
    found = content.get("eos_token_id")
    ids = () if found is None else tuple(found) if isinstance(found, list) else (found,)
    for id in ids:
        if type(id) is not int or not 0 <= id <= largest:
            raise RenderError(
                f"{path}: eos_token_id has {str(id)[:40]!r}; token ids of 0 to {largest} are needed"
            )
    return ids


def _why_refused(text: str, error: Exception) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        return f"it has the lone surrogate {text[problem.start]!r}, which is no character"
    return told(error)
