"""Text → token ids, each segment between special tokens encoded once.

A tokenizer cuts a text at its added tokens before anything else: normalizer, pre-tokenizer and
merges see one segment at a time. The ids of a text are therefore those of its segments in a row,
and a conversation that is rendered again costs only the encoding of what is new in it:

    text        <|im_start|>user\\nab?<|im_end|>\\n<|im_start|>assistant\\n
    segments    "<|im_start|>" "user\\nab?" "<|im_end|>" "\\n" "<|im_start|>" "assistant\\n"

A text is one segment where this does not hold: for pre-tokenizers that treat the beginning of a
text in a special way (Metaspace with prepend_scheme "first"), added tokens that look at the word
before them (single_word), components and tokenizer classes with Python code of their own, and
tokenizers of other libraries. Whole texts are then remembered: the first prompt of the samples of a
prompt is encoded once.

Encodings are kept up to CACHE_BYTES, those used last. Threads may share an encoder.
"""

import functools
import json
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

CACHE_BYTES = 256 * 2**20
LONG_CHARS = 16_384  # several milliseconds to encode
# Each entry's key, array header and place in the table, roughly.
_ENTRY_BYTES = 300
# Those that treat a segment alike wherever it is in a text.
_PRE_TOKENIZERS = {
    "BertPreTokenizer",
    "ByteLevel",
    "CharDelimiterSplit",
    "Digits",
    "FixedLength",
    "Metaspace",  # unless its prepend_scheme is "first"
    "Punctuation",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}
_NORMALIZERS = {
    "BertNormalizer",
    "ByteLevel",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Replace",
    "Strip",
    "StripAccents",
}


class Encoder:
    """`ids(text)` equals `tokenizer.encode(text, add_special_tokens=False)`."""

    def __init__(self, tokenizer, cache_bytes: int = CACHE_BYTES):
        self._tokenizer = tokenizer
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[str, np.ndarray] = OrderedDict()  # by segment, last used last
        self._bytes = 0
        self._lock = threading.Lock()  # of _kept and _bytes
        self._backend = _backend(tokenizer)
        if self._backend is not None:
            self._added, self._borders = _added_tokens(self._backend)

    def __reduce__(self):
        """A copy for another process, which has encoded nothing."""
        return Encoder, (self._tokenizer, self._cache_bytes)

    def ids(self, text: str) -> np.ndarray:
        """[n] i32"""
        segments = self._segments(text)
        return np.concatenate([np.empty(0, np.int32), *map(self._segment_ids, segments)])

    def _segments(self, text: str) -> list[str]:
        if self._backend is None:
            return [text]
        segments = []
        start = 0
        for found in self._added.finditer(text):
            if found[0] in self._borders:
                segments += [text[start : found.start()], found[0]]
                start = found.end()
        segments.append(text[start:])
        return [segment for segment in segments if segment]

    def _segment_ids(self, segment: str) -> np.ndarray:
        ids = self._find(segment)
        if ids is None:
            ids = self._encode(segment)
            self._keep(segment, ids)
        return ids

    def _encode(self, segment: str) -> np.ndarray:
        if self._backend is None:
            ids = self._tokenizer.encode(segment, add_special_tokens=False)
        else:  # without the offsets of the tokens, which take a third of the time
            ids = self._backend.encode_batch_fast([segment], add_special_tokens=False)[0].ids
        return np.array(ids, np.int32)

    def _find(self, segment: str) -> np.ndarray | None:
        with self._lock:
            ids = self._kept.get(segment)
            if ids is not None:
                self._kept.move_to_end(segment)
            return ids

    def _keep(self, segment: str, ids: np.ndarray) -> None:
        with self._lock:
            if segment not in self._kept:
                self._kept[segment] = ids
                self._bytes += _size(segment, ids)
            while self._bytes > self._cache_bytes:
                self._bytes -= _size(*self._kept.popitem(last=False))


def _size(segment: str, ids: np.ndarray) -> int:
    return sys.getsizeof(segment) + ids.nbytes + _ENTRY_BYTES


@functools.cache
def encoding_thread() -> ThreadPoolExecutor:
    """For long texts: tokenizers release the interpreter lock. One thread, so that the first of
    equal texts is encoded and the others find its encoding."""
    return ThreadPoolExecutor(1, thread_name_prefix="encoding")


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of the words that begins at a place; nothing if there are none.

    Shared beginnings are written once: the time does not depend on the number of words.
    """
    return re.compile(_alternatives(sorted(set(words))) or "(?!)")


def _alternatives(words: list[str]) -> str:
    """`a(?:b(?:c)?|d)` for ab, abc and ad."""
    shared = os.path.commonprefix(words)
    rests: dict[str, list[str]] = {}  # what follows it, by first letter
    for word in words:
        if len(word) > len(shared):
            rests.setdefault(word[len(shared)], []).append(word[len(shared) :])
    branches = "|".join(map(_alternatives, rests.values()))
    if not branches:
        return re.escape(shared)
    return f"{re.escape(shared)}(?:{branches}){'?' if shared in words else ''}"


def _backend(tokenizer) -> Any | None:
    """The `tokenizers.Tokenizer` of a tokenizer that encodes segments alike wherever they are."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.encode is PreTrainedTokenizerFast.encode
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and not tokenizer.split_special_tokens
    )
    if not is_plain:
        return None
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    independent = (
        _all_known(backend.pre_tokenizer, _PRE_TOKENIZERS)
        and _all_known(backend.normalizer, _NORMALIZERS)
        and not getattr(backend.model, "dropout", None)
        and not any(token.single_word for token in added)
    )
    if not independent:
        return None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend


def _all_known(component: Any | None, known: set[str]) -> bool:
    """Whether a normalizer or pre-tokenizer consists of `known` ones."""
    if component is None:
        return True
    try:
        described = json.loads(component.__getstate__())
    except Exception:  # of Python code
        return False
    return _known(described, known)


def _known(described: dict[str, Any], known: set[str]) -> bool:
    if described["type"] == "Sequence":
        parts = described.get("pretokenizers") or described.get("normalizers") or []
        return all(_known(part, known) for part in parts)
    return described["type"] in known and described.get("prepend_scheme") != "first"


def _added_tokens(backend) -> tuple[re.Pattern[str], set[str]]:
    """What the backend finds in a text before it is normalized, and those of it that take nothing
    but themselves from the text."""
    added = backend.get_added_tokens_decoder().values()
    found = [token for token in added if not token.normalized]
    borders = {token.content for token in found if not token.lstrip and not token.rstrip}
    return any_of(token.content for token in found), borders
