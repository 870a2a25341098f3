"""Tokenizers and chat templates in the manner of Qwen3, gpt-oss, Llama 3 and DeepSeek, small and built here; and an
engine that reads from a script."""

from dataclasses import dataclass, field

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megastep.rollout.generation import Generation, Sampling
from megastep.rollout.renderer import Renderer

# Thinking is kept from the last question of the user on, dropped before; tools answer within a user turn.
QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set parts = m.content.split('</think>') %}
        {%- set said = parts[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and parts | length > 1 %}
            {{- '<think>\\n' + parts[0].split('<think>')[-1].strip('\\n') + '\\n</think>\\n\\n' }}
        {%- elif loop.last %}
            {{- '<think>\\n\\n</think>\\n\\n' }}
        {%- endif %}
        {{- said + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# Thinking has a channel of its own and is never in the history of a final answer; <|return|> becomes <|end|> there.
GPT_OSS = """\
{{- '<|start|>system<|message|>You are helpful.<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>' in m.content %}{{- raise_exception('thinking belongs in its own field') }}{% endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- raise_exception('a tool message needs a tool call before it') }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

# Contents are trimmed; any role goes.
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# Turns are told apart by added tokens that are not special.
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}
    {%- else %}{{- '<｜User｜>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}"""

# Nothing tells where the model's turn ends.
OPEN_ENDED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ 'assistant: ' }}"
)

MARKS = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "gpt_oss": ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "deepseek": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
    "open_ended": ["<|endoftext|>"],
}
ORDINARY = {"deepseek": ["<｜User｜>", "<｜Assistant｜>"]}  # added, and not special
TEMPLATES = {
    "qwen3": QWEN3,
    "gpt_oss": GPT_OSS,
    "llama3": LLAMA3,
    "deepseek": DEEPSEEK,
    "open_ended": OPEN_ENDED,
}
BOS = {"llama3": "<|begin_of_text|>", "deepseek": "<｜begin▁of▁sentence｜>"}
EOS = {
    "qwen3": "<|im_end|>",
    "gpt_oss": "<|return|>",
    "llama3": "<|eot_id|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "open_ended": "<|endoftext|>",
}


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Bytes and a few merges: the same text has several tokenizations, of which a model may sample any."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("l", "l"), ("ab", "ab")]
    vocab = {piece: i for i, piece in enumerate(letters + ["".join(pair) for pair in merges])}
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS[kind]])
    made.add_tokens(["<think>", "</think>", *ORDINARY.get(kind, [])])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=BOS.get(kind),
        eos_token=EOS[kind],
        chat_template=TEMPLATES[kind],
    )


def ids(kind_or_renderer, text: str) -> np.ndarray:
    made = (
        kind_or_renderer.tokenizer
        if isinstance(kind_or_renderer, Renderer)
        else tokenizer(kind_or_renderer)
    )
    return np.array(made.encode(text, add_special_tokens=False), np.int32)


LAYERS, TOP_K = 2, 2


@dataclass
class Script:
    """A `generate` that says what it was told to, in turn, and remembers what it was asked."""

    renderer: Renderer
    replies: list  # a text, ids, or an exception to raise; the last one again and again
    routing: bool = False
    calls: list[tuple[np.ndarray, Sampling, str, int]] = field(default_factory=list)

    async def __call__(
        self, prompt_ids, sampling, *, session, routing_start=0, routing_version=None
    ) -> Generation:
        reply = self.replies[min(len(self.calls), len(self.replies) - 1)]
        self.calls.append((prompt_ids, sampling, session, routing_start))
        if isinstance(reply, BaseException):
            raise reply
        said = ids(self.renderer, reply) if isinstance(reply, str) else np.array(reply, np.int32)
        ended = np.flatnonzero(np.isin(said, sampling.stop_token_ids))
        said = said[: ended[0] + 1] if len(ended) else said
        cut = len(said) > sampling.max_tokens or not len(ended)
        said = said[: sampling.max_tokens]
        return Generation(
            ids=said,
            logprobs=-np.arange(1, len(said) + 1, dtype=np.float32),
            versions=np.array([[3, len(said)]] if len(said) else np.empty((0, 2)), np.int32),
            finish="length" if cut else "stop",
            routing=self._experts(prompt_ids, said, routing_start) if self.routing else None,
            routing_start=routing_start if self.routing else 0,
        )

    def _experts(self, prompt_ids, said, start) -> np.ndarray:
        """[n, L, K]: of every token but the last; the token's own id, so that a shift by one shows."""
        forwarded = np.concatenate([prompt_ids, said])[
            start : max(len(prompt_ids) + len(said) - 1, start)
        ]
        return np.broadcast_to(
            (forwarded % 64)[:, None, None], (len(forwarded), LAYERS, TOP_K)
        ).astype(np.uint8)
