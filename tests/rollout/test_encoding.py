"""Encodings by segment equal those of the whole text, for every kind of tokenizer."""

import pickle
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megastep.rollout.encoding import Encoder, any_of
from megastep.rollout.renderer import Renderer

from . import chats

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im_end|>x", "im_", "</s>", "<s>"]
WORDS = ["Hello", "all", "hell", "ab", "abab", "it's", "e\u0301", "ﬁ", "日本", "🙂", "I'M", "123"]
LINES = [" ".join(WORDS), "Hello, all hell  abab\n\n\tab it's 12345 ... e\u0301ab ﬁ 日本 🙂🙂"] * 5
GPT = (
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_bpe(pre_tokenizer, normalizer=None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def characters_bpe(pre_tokenizer, normalizer=None) -> Tokenizer:
    """As sentencepiece: characters, with an unknown token."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizer
    made.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(LINES, trainer)
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["<unk>"], show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return made


class Unsplit:
    def pre_tokenize(self, text):
        text.split(lambda i, part: [part])


SEQUENCE = pre_tokenizers.Sequence
LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
BY_SEGMENT = {
    "byte_level": lambda: byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix_space": lambda: byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no_regex": lambda: byte_bpe(pre_tokenizers.ByteLevel(False, use_regex=False)),
    "qwen": lambda: byte_bpe(
        SEQUENCE(
            [
                pre_tokenizers.Split(Regex(GPT), "isolated"),
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ]
        ),
        normalizers.NFC(),
    ),
    "metaspace_always": lambda: characters_bpe(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace_never": lambda: characters_bpe(pre_tokenizers.Metaspace(prepend_scheme="never")),
    "llama_legacy": lambda: characters_bpe(None, LLAMA),
    "strip": lambda: characters_bpe(pre_tokenizers.Whitespace(), normalizers.Strip()),
    "digits": lambda: byte_bpe(SEQUENCE([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel()])),
    "unigram": unigram,
    "word_piece": word_piece,
}
WHOLE = {
    "metaspace_first": lambda: characters_bpe(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "nested_first": lambda: characters_bpe(
        SEQUENCE([pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")])
    ),
}
FLAGS = {
    "plain": {},
    "lstrip": {"lstrip": True},
    "rstrip": {"rstrip": True},
    "both": {"lstrip": True, "rstrip": True},
    "normalized": {"normalized": True},
}


def tokenizer(made: Tokenizer, **flags) -> PreTrainedTokenizerFast:
    """The flags are of every second special token."""
    tokens = []
    for i, text in enumerate(SPECIAL):
        tokens.append(AddedToken(text, **({"normalized": False} | (flags if i % 2 else {}))))
    made.add_special_tokens(tokens)
    made.add_tokens(["<think>", "</think>", "hell"])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def whole(made, text: str) -> list[int]:
    return made.encode(text, add_special_tokens=False)


TOKENIZERS = {
    f"{name}-{flag}": tokenizer(make(), **flags)
    for name, make in (BY_SEGMENT | WHOLE).items()
    for flag, flags in FLAGS.items()
}
TEXTS = st.lists(
    st.sampled_from([*SPECIAL, *WORDS, " ", "  ", "\n", "\n\n", "▁", "<", "|im_end|>", "<think>"])
    | st.text(max_size=3),
    max_size=14,
).map("".join)


@given(text=TEXTS, data=st.data())
@settings(max_examples=1500, deadline=None)
def test_s6_segments_encode_as_the_whole_text(text, data):
    """Twice: encoded, and remembered."""
    name = data.draw(st.sampled_from(sorted(TOKENIZERS)))
    encoder = ENCODERS[name]
    try:
        expected = whole(TOKENIZERS[name], text)
    except (TypeError, UnicodeEncodeError):  # a lone surrogate
        return
    for _ in range(2):
        ids = encoder.ids(text)
        assert ids.dtype == np.int32 and ids.tolist() == expected, name


ENCODERS = {name: Encoder(made) for name, made in TOKENIZERS.items()}


def encoded(encoder: Encoder, texts: list[str]) -> list[str]:
    """What the tokenizer is asked to encode for some texts."""
    asked = []
    encode = encoder._encode
    encoder._encode = lambda segment: asked.append(segment) or encode(segment)  # type: ignore
    for text in texts:
        encoder.ids(text)
    return asked


FIRST = "<|im_start|>user\nab?<|im_end|>\n<|im_start|>assistant\n"
SECOND = FIRST + "abab<|im_end|>\n<|im_start|>user\nhell<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", BY_SEGMENT)
def test_s6_a_longer_conversation_costs_what_is_new(name):
    asked = encoded(Encoder(TOKENIZERS[f"{name}-plain"]), [FIRST, SECOND])
    assert asked[-2:] == ["assistant\nabab", "user\nhell"] and len(asked) == len(set(asked)) == 7


@pytest.mark.parametrize("name", WHOLE)
def test_s6_a_tokenizer_that_looks_at_the_beginning_of_a_text_encodes_it_whole(name):
    made = TOKENIZERS[f"{name}-plain"]
    assert encoded(Encoder(made), [FIRST, SECOND, FIRST]) == [FIRST, SECOND]
    by_segment = [*whole(made, "<|im_end|>"), *whole(made, "ab")]
    assert whole(made, "<|im_end|>ab") != by_segment  # it would be wrong


def test_s6_other_tokenizers_encode_whole_texts():
    single = tokenizer(BY_SEGMENT["byte_level"](), single_word=True)
    custom = tokenizer(BY_SEGMENT["byte_level"]())
    own_code = pre_tokenizers.PreTokenizer.custom(Unsplit())
    custom.backend_tokenizer.pre_tokenizer = own_code
    dropout = Tokenizer(models.BPE({"a": 0, "<": 1}, [], dropout=0.5))
    splits = tokenizer(BY_SEGMENT["byte_level"]())
    splits.split_special_tokens = True

    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *arguments, **options):
            return super()._encode_plus(text[::-1], *arguments, **options)

    own = Own(tokenizer_object=BY_SEGMENT["byte_level"]())
    for made in (single, custom, tokenizer(dropout), splits, own):
        assert encoded(Encoder(made), [FIRST]) == [FIRST]
    for made in (single, splits, own):
        assert Encoder(made).ids(FIRST).tolist() == whole(made, FIRST)


@pytest.mark.parametrize("folder", ["bytes", "chase"])
def test_s6_a_loaded_tokenizer_is_encoded_by_segment(folder):
    made = AutoTokenizer.from_pretrained(f"configs/models/{folder}")
    end = made.eos_token
    assert encoded(Encoder(made), [f"from{end}hops{end}from"]) == ["from", end, "hops"]


def test_truncation_of_the_tokenizer_file_is_not_applied():
    made = TOKENIZERS["byte_level-plain"].backend_tokenizer
    limited = Tokenizer.from_str(made.to_str())
    limited.enable_truncation(3)
    loaded = PreTrainedTokenizerFast(tokenizer_object=limited)
    assert Encoder(loaded).ids(FIRST).tolist() == whole(loaded, FIRST)
    assert len(Encoder(loaded).ids("a b c d e f")) > 3


def test_the_longest_word_matches():
    assert any_of(["ab", "abc", "ad", "b"]).findall("abcabdadb") == ["abc", "ab", "ad", "b"]
    assert any_of([]).findall("abc") == []


# ---------------------------------------------------------------- what is kept


def test_kept_encodings_are_limited():
    made = TOKENIZERS["byte_level-plain"]
    encoder = Encoder(made, cache_bytes=20_000)
    texts = [f"text {i} " + "ab" * 100 for i in range(200)]
    uses = [use for text in texts for use in (text, texts[0])]
    asked = encoded(encoder, uses)
    assert asked.count(texts[0]) == 1  # in use, and kept
    assert 10 < len(encoder._kept) < 100
    assert sum(len(text) + ids.nbytes for text, ids in encoder._kept.items()) < 20_000
    assert encoder.ids(texts[1]).tolist() == whole(made, texts[1]) and asked[-1] == texts[1]


def test_a_text_larger_than_the_limit_is_not_kept():
    encoder = Encoder(TOKENIZERS["byte_level-plain"], cache_bytes=1000)
    for _ in range(2):
        assert len(encoder.ids("ab" * 5000)) > 0
    assert not encoder._kept and encoder._bytes == 0


def test_a_changed_result_does_not_change_what_is_kept():
    encoder = Encoder(TOKENIZERS["byte_level-plain"])
    encoder.ids("abab")[:] = 0
    assert encoder.ids("abab").any()


def test_threads_share_an_encoder():
    made = TOKENIZERS["qwen-plain"]
    encoder = Encoder(made, cache_bytes=3000)  # evicts all the time
    texts = [FIRST + f"word{i % 20} abab<|im_end|>" for i in range(300)]
    expected = [whole(made, text) for text in texts]
    wrong = []

    def run() -> None:
        wrong.extend(t for t, ids in zip(texts, expected) if encoder.ids(t).tolist() != ids)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and encoder._bytes <= 3000


def test_an_encoder_can_be_sent_to_another_process():
    renderer = Renderer(chats.tokenizer("qwen3"), "chat")
    messages = [{"role": "user", "content": "abab"}]
    copied = pickle.loads(pickle.dumps(renderer))
    assert copied.prompt_ids(messages).tolist() == renderer.prompt_ids(messages).tolist()


# ---------------------------------------------------------------- through the templates

KINDS = [kind for kind in chats.TEMPLATES if kind != "open_ended"]
RENDERERS = {(kind, mode): None for kind in KINDS for mode in ("tokens", "chat")}
CONTENTS = st.lists(
    st.sampled_from(["ab", "all hell", " ", "\n", "<think>", "</think>", "x", "é"])
    # gpt-oss's template rejects a channel within a message.
    | st.sampled_from([m for marks in chats.MARKS.values() for m in marks if "channel" not in m]),
    min_size=1,
    max_size=6,
).map("".join)


@given(case=st.sampled_from(sorted(RENDERERS)), contents=st.lists(CONTENTS, min_size=3, max_size=9))
@settings(max_examples=200, deadline=None)
def test_s6_histories_are_those_of_whole_encodings(case, contents):
    """One renderer keeps its encodings over all conversations, the other encodes whole texts."""
    if RENDERERS[case] is None:
        kept = Renderer(chats.tokenizer(case[0]), case[1])
        plain = Renderer(chats.tokenizer(case[0]), case[1])
        plain.encoder._backend = None
        plain.encoder._cache_bytes = 0
        RENDERERS[case] = kept, plain
    prompts = []
    for renderer in RENDERERS[case]:
        first, *turns = contents
        history = renderer.history([{"role": "user", "content": first}])
        found = [history.prompt_ids.tolist()]
        for text, observed in zip(turns[::2], turns[1::2]):
            ids = [*chats.ids(renderer, text), renderer.end_id]
            observation = [{"role": "user", "content": observed}]
            history.extend(np.array(ids, np.int32), observation)
            found.append(history.prompt_ids.tolist())
        prompts.append(found)
    assert prompts[0] == prompts[1]
