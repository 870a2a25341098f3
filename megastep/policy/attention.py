"""Attention over a trie: token `k` is visible to token `q` iff `k <= q < end[k]`, in depth-first order.

    CPU     blocks of consecutive tokens, each against its root path, below
    CUDA    FlexAttention with that predicate; Transformer Engine's packed kernel where nothing branches

Blocks. A block is a piece of a long node, or several short nodes in a row. What a block `[a, b)` sees is the path from
the root to `a`, and itself: an earlier token that is visible to some token of the block is visible to `a`. That falls
in two:

    shared    the path's tokens whose subtree holds the whole block: everybody sees them, no mask
    local     the rest of the path and the block itself, under a mask

Each part is one call of torch's flash kernel for CPU; a short shared part goes with the local one, a long one has its
own call, and the two are combined by their log-sum-exp. The kernel's backward takes the output and the log-sum-exp of
the *whole* row, and then gives the right gradients for any subset of the keys: so backward runs part by part too,
gathers the keys of the path again, and nothing but the queries, keys, values and outputs is kept. Memory: O(tokens),
never [tokens, tokens].

Grouped queries: the query heads of a key head are rows beside each other. Keys are never repeated.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megastep.types import Trie

BLOCK_TOKENS = 160  # at most; measured with tools/bench_layout.py
SHORT_PATH = (
    512  # tokens of a shared part that cost less under the mask than in a call of their own
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class TrieParams(PackedSeqParams):
    """What Megatron hands through its layers to the core attention: the trie, prepared once per pass."""

    blocks: "list[Block] | None" = None  # CPU
    block_mask: object | None = None  # CUDA, where the trie branches


def trie_params(trie: Trie, groups: int, device: torch.device) -> TrieParams:
    """For one pass over a micro-batch; all layers use it. groups: query heads per key head."""
    branches = trie.branches
    # One stretch for the rotary embedding, which then takes its frequencies per token; Transformer Engine needs the
    # sequences themselves.
    starts = trie.sequence_starts() if device.type == "cuda" and not branches else np.zeros(1, int)
    params = packed(np.append(starts, len(trie)), device)
    if device.type == "cpu":
        params.blocks = blocks_of(trie, groups)
    elif branches:
        params.block_mask = _flex_mask(trie, device)
    return params


def packed(
    starts: np.ndarray, device: torch.device, padded_starts: np.ndarray | None = None
) -> TrieParams:
    """Sequences that follow each other, the last start being the end; with context parallelism padded apart."""
    lengths = torch.tensor(starts, dtype=torch.int32, device=device)
    padded = (
        None
        if padded_starts is None
        else torch.tensor(padded_starts, dtype=torch.int32, device=device)
    )
    longest = int(np.diff(starts if padded_starts is None else padded_starts).max())
    return TrieParams(
        "thd", lengths, lengths, padded, padded, max_seqlen_q=longest, max_seqlen_kv=longest
    )


class TrieAttention(torch.nn.Module):
    """Core attention of the CPU spec. Megatron's own unfused attention refuses packed sequences."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused):
        # Megatron's builder also passes layer_number, mask type, attention type and groups.
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: TrieParams | None = None,
    ) -> Tensor:
        """query [T, heads, dim]; key, value [T, kv_heads, dim] → [T, heads, dim]."""
        if not isinstance(packed_seq_params, TrieParams):
            raise ValueError("TrieAttention needs the micro-batch's trie, see trie_params")
        return _TrieAttention.apply(query, key, value, packed_seq_params.blocks, self.scale)


# ---------------------------------------------------------------- CPU


@dataclass
class Block:
    """Tokens [start, stop), and what they see: all of `shared`, and of `local` what the mask leaves."""

    start: int
    stop: int
    shared: slice | Tensor | None  # [S] tokens
    local: slice | Tensor  # [L] tokens
    mask: Tensor  # [(stop - start) × groups, L] 0 or -inf


def blocks_of(
    trie: Trie, groups: int, block_tokens: int = BLOCK_TOKENS, short_path: int = SHORT_PATH
) -> list[Block]:
    """Every token is in one block; blocks follow each other."""
    starts = _pieces(trie, block_tokens)
    stops = starts[1:] + [len(trie)]
    ends = trie.end[starts].tolist()
    blocks, path = [], []  # path: (start, stop, end) of the nodes above the current one
    first = 0
    while first < len(starts):
        a = starts[first]
        last = first + 1
        while last < len(starts) and stops[last] - a <= block_tokens:
            last += 1
        while path and path[-1][2] <= a:
            path.pop()
        shared, local = _seen(a, stops[last - 1], path, short_path)
        if last == first + 1:
            mask = _corner(
                _causal_mask(groups, block_tokens, short_path), stops[first] - a, groups, len(local)
            )
        else:
            mask = _mask(trie, a, stops[last - 1], local, groups)
        blocks.append(Block(a, stops[last - 1], _index(shared), _index(local), mask))
        for node in range(first, last):
            while path and path[-1][2] <= starts[node]:
                path.pop()
            path.append((starts[node], stops[node], ends[node]))
        first = last
    return blocks


def _seen(
    a: int, b: int, path: list[tuple[int, int, int]], short_path: int
) -> tuple[np.ndarray, np.ndarray]:
    """The shared and the local tokens of a block."""
    shared = [np.arange(start, stop) for start, stop, end in path if end >= b]
    partly = [np.arange(start, stop) for start, stop, end in path if end < b]
    if sum(map(len, shared)) <= short_path:
        shared, partly = [], shared + partly
    nothing = np.zeros(0, np.int64)
    return np.concatenate([nothing, *shared]), np.concatenate([*partly, np.arange(a, b)])


def _index(tokens: np.ndarray) -> slice | Tensor | None:
    """A slice, which copies nothing, where the tokens are one run."""
    if not len(tokens):
        return None
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return torch.from_numpy(tokens)


def _mask(trie: Trie, a: int, b: int, keys: np.ndarray, groups: int) -> Tensor:
    queries = np.arange(a, b)[:, None]
    visible = (keys <= queries) & (queries < trie.end[keys])
    mask = torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)
    return mask.repeat_interleave(groups, dim=0)


@functools.cache
def _causal_mask(groups: int, tokens: int, before: int) -> Tensor:
    """[tokens × groups, before + tokens]: a piece of a node sees what is before it, and itself causally."""
    mask = torch.zeros(tokens, before + tokens)
    mask[:, before:].masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    return mask.repeat_interleave(groups, dim=0)


def _corner(causal: Tensor, tokens: int, groups: int, keys: int) -> Tensor:
    """The part of it for fewer tokens, and fewer before them; nothing is copied."""
    before = causal.shape[1] - len(causal) // groups
    return causal[: tokens * groups, before + tokens - keys : before + tokens]


def _pieces(trie: Trie, most_tokens: int) -> list[int]:
    """Where nodes start, and within long nodes the starts of equal pieces."""
    starts = []
    for start, stop in zip(trie.node_starts.tolist(), [*trie.node_starts[1:].tolist(), len(trie)]):
        pieces = -(-(stop - start) // most_tokens)
        starts += [start + (stop - start) * i // pieces for i in range(pieces)]
    return starts


class _TrieAttention(torch.autograd.Function):
    """The arrays inside are [kv_heads, T × group, dim] for queries and [2, kv_heads, T, dim] for keys and values."""

    @staticmethod
    def forward(ctx, query, key, value, blocks, scale):
        tokens, heads, dim = query.shape
        groups = heads // key.shape[1]
        q = query.view(tokens, -1, groups, dim).transpose(0, 1).reshape(-1, tokens * groups, dim)
        kv = torch.stack([key, value]).transpose(1, 2).contiguous()
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        own_calls = any(block.shared is not None for block in blocks)
        of_shared = torch.zeros_like(out) if own_calls else None
        lse_of_shared = torch.full_like(lse, -torch.inf) if own_calls else None
        for block in blocks:
            rows = slice(block.start * groups, block.stop * groups)
            o, l = _flash(
                *_inputs(q, rows, kv, block.local), attn_mask=block.mask.to(q.dtype), scale=scale
            )
            out[:, rows], lse[:, rows] = o.squeeze(1), l.squeeze(1)
            if block.shared is not None:
                o, l = _flash(*_inputs(q, rows, kv, block.shared), scale=scale)
                of_shared[:, rows], lse_of_shared[:, rows] = o.squeeze(1), l.squeeze(1)
        if own_calls:
            lse = _combine(out, lse, of_shared, lse_of_shared)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out.view(-1, tokens, groups, dim).transpose(0, 1).reshape(tokens, heads, dim)

    @staticmethod
    def backward(ctx, grad):
        q, kv, out, lse = ctx.saved_tensors
        tokens, heads, dim = grad.shape
        groups = heads // len(q)
        grad = grad.reshape(tokens, -1, groups, dim).transpose(0, 1).reshape(q.shape)
        dq = torch.empty_like(q)
        # A key has as many contributions as blocks see it: summed in fp32.
        dk, dv = torch.zeros(kv.shape, dtype=torch.float32)
        for block in ctx.blocks:
            rows = slice(block.start * groups, block.stop * groups)
            g, o, l = (t[:, rows].unsqueeze(1) for t in (grad, out, lse))
            gq, gk, gv = _flash_backward(
                g,
                *_inputs(q, rows, kv, block.local),
                o,
                l,
                0.0,
                False,
                attn_mask=block.mask.to(q.dtype),
                scale=ctx.scale,
            )
            dq[:, rows] = gq.squeeze(1)
            _add(dk, block.local, gk.squeeze(1))
            _add(dv, block.local, gv.squeeze(1))
            if block.shared is not None:
                inputs = _inputs(q, rows, kv, block.shared)
                gq, gk, gv = _flash_backward(g, *inputs, o, l, 0.0, False, scale=ctx.scale)
                dq[:, rows] += gq.squeeze(1)
                _add(dk, block.shared, gk.squeeze(1))
                _add(dv, block.shared, gv.squeeze(1))
        dq = dq.view(-1, tokens, groups, dim).transpose(0, 1).reshape(tokens, heads, dim)
        return dq, *(t.to(q.dtype).transpose(0, 1).contiguous() for t in (dk, dv)), None, None


def _inputs(
    q: Tensor, rows: slice, kv: Tensor, tokens: slice | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[kv_heads, 1, rows, dim] each."""
    seen = kv[:, :, tokens] if isinstance(tokens, slice) else kv.index_select(2, tokens)
    key, value = seen.unsqueeze(2)
    return q[:, rows].unsqueeze(1), key, value


def _combine(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Two softmaxes over disjoint keys as one over all of them: into `out`, and its log-sum-exp."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(other, (other_lse - total).exp_().unsqueeze(-1).to(out.dtype))
    return total


def _add(total: Tensor, tokens: slice | Tensor, part: Tensor) -> None:
    if isinstance(tokens, slice):
        total[:, tokens] += part
    else:
        total.index_add_(1, tokens, part.float())


# ---------------------------------------------------------------- CUDA


class FlexTrieAttention(torch.nn.Module):
    """Core attention of the CUDA spec. Written against torch 2.13 and Transformer Engine 2.11; not run on a GPU yet."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        softmax_scale=None,
        **more,
    ):
        super().__init__()
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.scale = softmax_scale or config.kv_channels**-0.5
        self.packed = TEDotProductAttention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            softmax_scale=softmax_scale,
            **more,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: TrieParams | None = None,
    ) -> Tensor:
        """query [T, heads, dim]; key, value [T, kv_heads, dim] → [T, heads, dim]."""
        if packed_seq_params.block_mask is None:
            return self.packed(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        q, k, v = (
            t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)
        )  # [1, heads, T, dim]
        out = _compiled_flex()(
            q, k, v, block_mask=packed_seq_params.block_mask, scale=self.scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled_flex():
    """One compilation for all layers; lengths differ from micro-batch to micro-batch."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _compiled_block_mask():
    """Uncompiled it would build the dense mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=True)


def _flex_mask(trie: Trie, device: torch.device):
    end = torch.from_numpy(trie.end).to(device)

    def visible(batch, head, q, k):
        return (k <= q) & (q < end[k])

    return _compiled_block_mask()(visible, None, None, len(trie), len(trie), device=device)
