"""Attention over a trie in Triton, for CUDA. Not run on a GPU yet.

Tests run it in Triton's interpreter, and compile it for an A100 and an H100, both on CPU.

    forward     a program per block of queries and head, over the key blocks that it sees: online
                softmax in fp32, base 2
    dq          the same programs; also delta, the sum of output × gradient of each row
    dk, dv      a program per block of keys and key head, over the query blocks that see it and the
                query heads of the group

Only pairs of blocks with a visible pair of tokens are computed, full ones without a mask. Tokens
beyond the last need no mask of their own: they see nothing and nothing sees them. Saved for
backward: inputs, output and log-sum-exp. Matrix products of fp32 inputs are in fp32, not TF32.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megastep.policy.visible_blocks import visible_blocks
from megastep.types import Trie

BLOCK_TOKENS = 64  # not tuned on a GPU
MIN_DOT_DIM = 16  # of Triton's matrix product

LOG2_E = tl.constexpr(1.4426950408889634)
# Below any score, and finite: a row without a visible key so far has this maximum.
LOWEST = tl.constexpr(-1e30)


class BlockList(NamedTuple):
    """The blocks that each block i is computed with; a pair is full or partial.

    full      listed[starts[i] : full_stops[i]]
    partial   listed[full_stops[i] : starts[i + 1]]
    """

    starts: Tensor  # [n + 1] i32
    full_stops: Tensor  # [n] i32
    listed: Tensor  # [m] i32


@dataclass
class TrieBlocks:
    """A trie in the form of the kernels."""

    end: Tensor  # [T] i32
    keys: BlockList  # of each query block
    queries: BlockList  # of each key block
    block_tokens: int


def trie_blocks(trie: Trie, device: torch.device, block_tokens: int = BLOCK_TOKENS) -> TrieBlocks:
    blocks = visible_blocks(trie, block_tokens)
    return TrieBlocks(
        end=torch.from_numpy(trie.end).to(device),
        keys=_block_list(blocks.partial, blocks.full, device),
        queries=_block_list(blocks.partial.T, blocks.full.T, device),
        block_tokens=block_tokens,
    )


def _block_list(partial: np.ndarray, full: np.ndarray, device: torch.device) -> BlockList:
    # [n, 2 n]: the full blocks of each row before its partial ones.
    listed = np.nonzero(np.concatenate([full, partial], axis=1))[1] % len(full)
    full_counts = full.sum(axis=1)
    starts = np.append(0, np.cumsum(full_counts + partial.sum(axis=1)))
    arrays = (starts, starts[:-1] + full_counts, listed)
    return BlockList(*(torch.from_numpy(a.astype(np.int32)).to(device) for a in arrays))


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: TrieBlocks, scale: float) -> Tensor:
    """query [T, heads, dim]; key, value [T, kv_heads, dim] → [T, heads, dim]."""
    return _TritonTrieAttention.apply(query, key, value, blocks, scale)


class _TritonTrieAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, blocks, scale):
        # Megatron's values are a view of its joint projection: copied here.
        query, key, value = (t.contiguous() for t in (query, key, value))
        tokens, heads, _ = query.shape
        out = torch.empty_like(query)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
        _forward[len(blocks.keys.full_stops), heads](
            *(query, key, value, blocks.end, *blocks.keys, out, lse),
            *(tokens, scale),
            **_constants(query, key, blocks.block_tokens),
        )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks = blocks
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        blocks = ctx.blocks
        grad = grad.contiguous()
        tokens, heads, _ = query.shape
        num_blocks = len(blocks.keys.full_stops)
        delta = torch.empty_like(lse)
        d_query, d_key, d_value = (torch.empty_like(t) for t in (query, key, value))
        constants = _constants(query, key, blocks.block_tokens)
        _backward_query[num_blocks, heads](
            *(query, key, value, blocks.end, *blocks.keys, out, lse, grad),
            *(delta, d_query),
            *(tokens, ctx.scale),
            **constants,
        )
        _backward_key[num_blocks, key.shape[1]](
            *(query, key, value, blocks.end, *blocks.queries, lse, grad, delta),
            *(d_key, d_value),
            *(tokens, ctx.scale),
            **constants,
        )
        return d_query, d_key, d_value, None, None


def _constants(query: Tensor, key: Tensor, block_tokens: int) -> dict[str, int]:
    """Values that the kernels are compiled for. Warps and stages: not tuned on a GPU."""
    heads, dim = query.shape[1:]
    return dict(
        HEADS=heads,
        GROUPS=heads // key.shape[1],
        DIM=dim,
        PADDED_DIM=max(triton.next_power_of_2(dim), MIN_DOT_DIM),
        BLOCK=block_tokens,
        num_warps=4 if dim <= 64 else 8,
        # Each stage of a loop keeps its blocks in shared memory; fp32 has room for one.
        num_stages=1 if query.dtype == torch.float32 else 2,
    )


# ---------------------------------------------------------------- kernels
#
# q, k, v, d_out …    blocks [BLOCK, PADDED_DIM] of the tensors query, key, value, grad …
# scores              times log2(e), so that exp2 of them is exp of the natural ones
# lse, delta          [HEADS, tokens]


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    query,
    key,
    value,
    end,
    starts,
    full_stops,
    listed,
    out,
    lse,
    tokens,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    block = tl.program_id(0)
    head = tl.program_id(1)
    queries = block * BLOCK + tl.arange(0, BLOCK)
    q = _load(query, queries, head, tokens, HEADS, DIM, PADDED_DIM)
    highest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    o = tl.zeros([BLOCK, PADDED_DIM], tl.float32)
    full_stop = tl.load(full_stops + block)
    for i in range(tl.load(starts + block), tl.load(starts + block + 1)):
        keys = tl.load(listed + i) * BLOCK + tl.arange(0, BLOCK)
        k = _load(key, keys, head // GROUPS, tokens, KV_HEADS, DIM, PADDED_DIM)
        v = _load(value, keys, head // GROUPS, tokens, KV_HEADS, DIM, PADDED_DIM)
        scores = _dot(q, tl.trans(k)) * (scale * LOG2_E)  # [queries, keys]
        if i >= full_stop:
            visible = _visible(queries[:, None], keys[None, :], end, tokens)
            scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - new_highest[:, None])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(p, 1)
        o = o * rescale[:, None] + _dot(p.to(v.dtype), v)
        highest = new_highest
    _store(out, o / total[:, None], queries, head, tokens, HEADS, DIM, PADDED_DIM)
    tl.store(lse + head * tokens + queries, highest + tl.log2(total), mask=queries < tokens)


@triton.jit(do_not_specialize=["tokens"])
def _backward_query(
    query,
    key,
    value,
    end,
    starts,
    full_stops,
    listed,
    out,
    lse,
    grad,
    delta,
    d_query,
    tokens,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    block = tl.program_id(0)
    head = tl.program_id(1)
    queries = block * BLOCK + tl.arange(0, BLOCK)
    q = _load(query, queries, head, tokens, HEADS, DIM, PADDED_DIM)
    o = _load(out, queries, head, tokens, HEADS, DIM, PADDED_DIM)
    d_out = _load(grad, queries, head, tokens, HEADS, DIM, PADDED_DIM)
    row_delta = tl.sum(o.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(delta + head * tokens + queries, row_delta, mask=queries < tokens)
    row_lse = tl.load(lse + head * tokens + queries, mask=queries < tokens, other=0.0)
    dq = tl.zeros([BLOCK, PADDED_DIM], tl.float32)
    full_stop = tl.load(full_stops + block)
    for i in range(tl.load(starts + block), tl.load(starts + block + 1)):
        keys = tl.load(listed + i) * BLOCK + tl.arange(0, BLOCK)
        k = _load(key, keys, head // GROUPS, tokens, KV_HEADS, DIM, PADDED_DIM)
        v = _load(value, keys, head // GROUPS, tokens, KV_HEADS, DIM, PADDED_DIM)
        scores = _dot(q, tl.trans(k)) * (scale * LOG2_E)  # [queries, keys]
        if i >= full_stop:
            visible = _visible(queries[:, None], keys[None, :], end, tokens)
            scores = tl.where(visible, scores, float("-inf"))
        p = tl.exp2(scores - row_lse[:, None])
        d_scores = p * (_dot(d_out, tl.trans(v)) - row_delta[:, None])
        dq += _dot(d_scores.to(k.dtype), k)
    _store(d_query, dq * scale, queries, head, tokens, HEADS, DIM, PADDED_DIM)


@triton.jit(do_not_specialize=["tokens"])
def _backward_key(
    query,
    key,
    value,
    end,
    starts,
    full_stops,
    listed,
    lse,
    grad,
    delta,
    d_key,
    d_value,
    tokens,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Everything is transposed, [keys, queries]: no product needs a transposed p or d_scores."""
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    keys = block * BLOCK + tl.arange(0, BLOCK)
    k = _load(key, keys, kv_head, tokens, KV_HEADS, DIM, PADDED_DIM)
    v = _load(value, keys, kv_head, tokens, KV_HEADS, DIM, PADDED_DIM)
    dk = tl.zeros([BLOCK, PADDED_DIM], tl.float32)
    dv = tl.zeros([BLOCK, PADDED_DIM], tl.float32)
    start = tl.load(starts + block)
    full_stop = tl.load(full_stops + block)
    stop = tl.load(starts + block + 1)
    for head in range(kv_head * GROUPS, (kv_head + 1) * GROUPS):
        for i in range(start, stop):
            queries = tl.load(listed + i) * BLOCK + tl.arange(0, BLOCK)
            q = _load(query, queries, head, tokens, HEADS, DIM, PADDED_DIM)
            d_out = _load(grad, queries, head, tokens, HEADS, DIM, PADDED_DIM)
            of_head = head * tokens + queries
            row_lse = tl.load(lse + of_head, mask=queries < tokens, other=0.0)
            row_delta = tl.load(delta + of_head, mask=queries < tokens, other=0.0)
            scores = _dot(k, tl.trans(q)) * (scale * LOG2_E)  # [keys, queries]
            if i >= full_stop:
                visible = _visible(queries[None, :], keys[:, None], end, tokens)
                scores = tl.where(visible, scores, float("-inf"))
            p = tl.exp2(scores - row_lse[None, :])
            dv += _dot(p.to(d_out.dtype), d_out)
            d_scores = p * (_dot(v, tl.trans(d_out)) - row_delta[None, :])
            dk += _dot(d_scores.to(q.dtype), q)
    _store(d_key, dk * scale, keys, kv_head, tokens, KV_HEADS, DIM, PADDED_DIM)
    _store(d_value, dv, keys, kv_head, tokens, KV_HEADS, DIM, PADDED_DIM)


@triton.jit
def _visible(queries, keys, end, tokens):
    """The predicate of attention.py; `queries` and `keys` are a row and a column, or reversed."""
    ends = tl.load(end + keys, mask=keys < tokens, other=0)
    return (keys <= queries) & (queries < ends)


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _load(
    tensor, rows, head, tokens, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr
):
    """[rows, PADDED_DIM] of a tensor [tokens, HEADS, DIM]; 0 beyond it."""
    offsets, inside = _elements(rows, head, tokens, HEADS, DIM, PADDED_DIM)
    return tl.load(tensor + offsets, mask=inside, other=0.0)


@triton.jit
def _store(
    tensor,
    block,
    rows,
    head,
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    offsets, inside = _elements(rows, head, tokens, HEADS, DIM, PADDED_DIM)
    tl.store(tensor + offsets, block.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def _elements(rows, head, tokens, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    dims = tl.arange(0, PADDED_DIM)[None, :]
    # i64: long micro-batches of many heads have more than 2³¹ elements.
    offsets = (rows[:, None].to(tl.int64) * HEADS + head) * DIM + dims
    return offsets, (rows[:, None] < tokens) & (dims < DIM)
