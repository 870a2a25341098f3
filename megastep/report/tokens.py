"""Tokens as HTML. Model output is untrusted: every character passes through `visible`."""

import html
import math
import re
from typing import Any

import numpy as np

from megastep.types import Step

CHARACTER_TOKENS = 4  # a character has at most four bytes, a token at least one
SHADES = 10
SHADES_PER_NAT = 1.5  # the darkest shade starts at a logprob of -6
SHOWN_EXPERTS = 32  # a tooltip with more numbers than these is unreadable
_INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# Control characters, bidirectional marks and surrogates are written as escapes.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """HTML that is safe inside an element and inside a quoted attribute."""
    return html.escape(_HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


class TokenDecoder:
    """The text of each token; its id without a tokenizer."""

    def __init__(self, tokenizer: Any = None):
        self.tokenizer = tokenizer
        self.special: set[int] = set()
        if tokenizer:
            self.special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}

    def pieces(self, ids: list[int]) -> list[str]:
        """One text per token, together the decoded text; empty where a token starts a character.

        A token is decoded after its predecessor, for some tokenizers put a space between the two.
        """
        if self.tokenizer is None:
            return [f" {id}" for id in ids]
        found = []
        begin = 0  # of the context that a token is decoded in
        before = ""  # the text of that context
        ended = -1  # the last token that completed a character
        for i, id in enumerate(ids):
            alone = self._decode([id])
            if id in self.special:
                piece = alone
            else:
                text = self._decode(ids[begin : i + 1])
                if text.endswith(_INCOMPLETE_CHARACTER) and i - ended < CHARACTER_TOKENS:
                    found.append("")
                    continue
                piece = text[len(before) :] if text.startswith(before) else alone
            found.append(piece)
            begin, before, ended = i, alone, i
        return found

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def prompt_html(ids: list[int], decoder: TokenDecoder) -> str:
    return "".join(
        f'<b class="special">{visible(piece)}</b>' if id in decoder.special else visible(piece)
        for id, piece in zip(ids, decoder.pieces(ids))
    )


def response_html(step: Step, decoder: TokenDecoder, part: slice) -> str:
    """A span per token of `part`, shaded by its logprob, with a tooltip."""
    ids = step.response_ids[part].tolist()
    versions = np.repeat(step.versions[:, 0], step.versions[:, 1])[part].tolist()
    trained = step.loss_mask[part].tolist()
    logprobs = [None] * len(ids) if step.logprobs is None else step.logprobs[part].tolist()
    indices = range(len(step.response_ids))[part]
    spans = []
    for index, id, piece, logprob, version, is_trained in zip(
        indices, ids, decoder.pieces(ids), logprobs, versions, trained
    ):
        classes = [] if logprob is None else [f"p{_shade(logprob)}"]
        classes += ["special"] * (id in decoder.special) + ["untrained"] * (not is_trained)
        facts = [f"id {id}", _logprob(logprob), f"version {version}"]
        facts.append("trained" if is_trained else "not trained")
        title = " · ".join(facts) + _routed_experts(step, index)
        text = visible(piece).replace("\n", "↵\n") or "▫"
        spans.append(f'<span class="{" ".join(classes)}" title="{title}">{text}</span>')
    return "".join(spans)


def _shade(logprob: float) -> int:
    if not math.isfinite(logprob):
        return SHADES - 1
    return max(0, min(SHADES - 1, int(-logprob * SHADES_PER_NAT)))


def _logprob(logprob: float | None) -> str:
    if logprob is None:
        return "logprob not recorded"
    return f"logprob {logprob:.4f} (p {math.exp(min(logprob, 0)):.3f})"


def _routed_experts(step: Step, token: int) -> str:
    """Routed experts of a response token per layer, where recorded."""
    if not isinstance(step.routing, np.ndarray) or step.routing[0:1].size > SHOWN_EXPERTS:
        return ""
    row = step.prompt_tokens + token - step.routing_start
    if not 0 <= row < len(step.routing):
        return ""
    return " · experts " + " | ".join(
        ",".join(map(str, layer)) for layer in step.routing[row].tolist()
    )
