"""Small tokenizers and chat templates like those of Qwen3, gpt-oss, Llama 3 and DeepSeek, and an
engine with scripted replies."""

from dataclasses import dataclass, field

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megastep.rollout.generation import Generation, Sampling
from megastep.rollout.renderer import Renderer
from megastep.types import FinishReason

# Thinking is dropped before the last user message; tool messages are part of a user turn.
QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set parts = m.content.split('</think>') %}
        {%- set answer = parts[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and parts | length > 1 %}
            {{- '<think>\\n' + parts[0].split('<think>')[-1].strip('\\n') + '\\n</think>\\n\\n' }}
        {%- elif loop.last %}
            {{- '<think>\\n\\n</think>\\n\\n' }}
        {%- endif %}
        {{- answer + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Thinking is in its own channel and not in the history, where <|return|> becomes <|end|>.
GPT_OSS = """\
{{- '<|start|>system<|message|>You are helpful.<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>' in m.content %}
            {{- raise_exception('thinking belongs in its own field') }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- raise_exception('a tool message needs a tool call before it') }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

# Contents are trimmed; any role is accepted.
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {{- m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Added tokens that are not special delimit turns.
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}
    {%- else %}{{- '<｜User｜>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}"""

# Tools are in the system turn, calls in tags; as Hermes and Qwen2.5.
HERMES = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# No token closes the model's turn.
OPEN_ENDED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ 'assistant: ' }}"
)

MARKS = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "gpt_oss": ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "deepseek": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
    "hermes": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "open_ended": ["<|endoftext|>"],
}
ORDINARY = {"deepseek": ["<｜User｜>", "<｜Assistant｜>"]}  # added tokens, not special
TEMPLATES = {
    "qwen3": QWEN3,
    "gpt_oss": GPT_OSS,
    "llama3": LLAMA3,
    "deepseek": DEEPSEEK,
    "hermes": HERMES,
    "open_ended": OPEN_ENDED,
}
BOS = {"llama3": "<|begin_of_text|>", "deepseek": "<｜begin▁of▁sentence｜>"}
EOS = {
    "qwen3": "<|im_end|>",
    "gpt_oss": "<|return|>",
    "llama3": "<|eot_id|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "hermes": "<|im_end|>",
    "open_ended": "<|endoftext|>",
}


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Bytes and a few merges: a text has several tokenizations, and a model may sample any."""
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


LAYERS = 2
TOP_K = 2


@dataclass
class ScriptedEngine:
    """A `generate` that returns `replies` in turn and records its calls."""

    renderer: Renderer
    replies: list  # a text, ids, or an exception to raise; the last one repeats
    routing: bool = False
    calls: list[tuple[np.ndarray, Sampling, str, int]] = field(default_factory=list)

    async def __call__(
        self, prompt_ids, sampling, *, session, routing_start=0, routing_version=None
    ) -> Generation:
        reply = self.replies[min(len(self.calls), len(self.replies) - 1)]
        self.calls.append((prompt_ids, sampling, session, routing_start))
        if isinstance(reply, BaseException):
            raise reply
        full = ids(self.renderer, reply) if isinstance(reply, str) else np.array(reply, np.int32)
        stops = np.flatnonzero(np.isin(full, sampling.stop_token_ids))
        end = stops[0] + 1 if len(stops) else len(full)
        is_truncated = end > sampling.max_tokens or not len(stops)
        sampled = full[: min(end, sampling.max_tokens)]
        count = len(sampled)
        return Generation(
            ids=sampled,
            logprobs=-np.arange(1, count + 1, dtype=np.float32),
            versions=np.array([[3, count]] if count else np.empty((0, 2)), np.int32),
            finish=FinishReason.LENGTH if is_truncated else FinishReason.STOP,
            routing=self._routing(prompt_ids, sampled, routing_start) if self.routing else None,
            routing_start=routing_start if self.routing else 0,
        )

    def _routing(self, prompt_ids, sampled, start) -> np.ndarray:
        """[n, L, K]: the id of each token but the last, modulo 64, which reveals a shift by one."""
        tokens = np.concatenate([prompt_ids, sampled])
        forwarded = tokens[start : max(len(tokens) - 1, start)]
        shape = (len(forwarded), LAYERS, TOP_K)
        return np.broadcast_to((forwarded % 64)[:, None, None], shape).astype(np.uint8)
