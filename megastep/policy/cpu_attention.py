"""Attention over a trie on CPU: blocks of consecutive tokens, each against its root path.

A block is a segment of a long node, or several short nodes in a row. Block `[a, b)` sees the path
from the root to `a`, and itself: an earlier token that is visible to any token of the block is
visible to `a`. The visible tokens are in two parts:

    shared    tokens of the path whose subtree contains the whole block: no mask
    local     the other tokens of the path and the block itself, under a mask

Each part is one call of torch's flash kernel for CPU, and the two are combined by their
log-sum-exp; a short shared part is computed with the local one. The kernel's backward takes the
output and the log-sum-exp of the *whole* row, which gives the right gradients for any subset of
the keys. Backward therefore also runs part by part and gathers the keys again: only queries, keys,
values and outputs are saved. Memory: O(tokens), never [tokens, tokens].

Grouped-query attention: the query heads of one key head are adjacent rows; keys are never repeated.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megastep.types import Trie

BLOCK_TOKENS = 160  # at most; measured with tools/bench_layout.py
# A shared part of at most this length costs less under the local mask than in its own kernel call.
SHORT_PATH_TOKENS = 512

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: "list[Block]", scale: float
) -> Tensor:
    """query [T, heads, dim]; key, value [T, kv_heads, dim] → [T, heads, dim]."""
    return _TrieAttention.apply(query, key, value, blocks, scale)


@dataclass
class Block:
    """Queries [start, stop), the keys they see, and the mask of the local ones."""

    start: int
    stop: int
    shared: slice | Tensor | None  # [S] tokens that every query sees
    local: slice | Tensor  # [L] tokens under the mask
    mask: Tensor  # [(stop - start) × groups, L] 0 or -inf


class Segment(NamedTuple):
    """Tokens [start, stop) of one node, whose subtree ends at `end`."""

    start: int
    stop: int
    end: int


def blocks_of(
    trie: Trie,
    groups: int,
    block_tokens: int = BLOCK_TOKENS,
    short_path_tokens: int = SHORT_PATH_TOKENS,
) -> list[Block]:
    """Consecutive blocks that cover the trie.

    Example: the trie of types.py, with block_tokens = 4 and short_path_tokens = 0.

        A B ─┬─ T C          segments    [0, 2) end 8    [2, 4) end 4    [4, 8) end 8
             └─ C . O D

        block [0, 4)   path: none                      shared: none   local: 0 to 3, tree mask
        block [4, 8)   path: [0, 2); [2, 4) has ended  shared: 0, 1   local: 4 to 7, causal mask
    """
    blocks = []
    path: list[Segment] = []  # from the root to the current segment
    for segments in _group_segments(_segments(trie, block_tokens), block_tokens):
        start = segments[0].start
        stop = segments[-1].stop
        _leave_subtrees(path, start)
        shared, local = _visible_tokens(start, stop, path, short_path_tokens)
        if len(segments) == 1:
            causal = _causal_mask(groups, block_tokens, short_path_tokens)
            mask = _corner(causal, stop - start, groups, len(local))
        else:
            mask = _tree_mask(trie, start, stop, local, groups)
        local_index = _index(local)
        assert local_index is not None, "the block itself is local"
        blocks.append(Block(start, stop, _index(shared), local_index, mask))
        for segment in segments:
            _leave_subtrees(path, segment.start)
            path.append(segment)
    return blocks


def _segments(trie: Trie, max_tokens: int) -> Iterator[Segment]:
    """The trie's nodes in order, long ones divided into equal segments."""
    starts = trie.node_starts.tolist()
    stops = [*starts[1:], len(trie)]
    ends = trie.end[starts].tolist()
    for start, stop, end in zip(starts, stops, ends):
        length = stop - start
        pieces = -(-length // max_tokens)
        bounds = [start + length * i // pieces for i in range(pieces + 1)]
        for first, last in zip(bounds, bounds[1:]):
            yield Segment(first, last, end)


def _group_segments(segments: Iterable[Segment], block_tokens: int) -> Iterator[list[Segment]]:
    """Consecutive segments, as many as fit into each block."""
    block: list[Segment] = []
    for segment in segments:
        if block and segment.stop - block[0].start > block_tokens:
            yield block
            block = []
        block.append(segment)
    if block:
        yield block


def _leave_subtrees(path: list[Segment], token: int) -> None:
    """Remove the segments that are not ancestors of `token`."""
    while path and path[-1].end <= token:
        path.pop()


def _visible_tokens(
    start: int, stop: int, path: list[Segment], short_path_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The shared and the local tokens of block [start, stop)."""
    shared = [np.arange(s.start, s.stop) for s in path if s.end >= stop]
    local = [np.arange(s.start, s.stop) for s in path if s.end < stop]
    if sum(map(len, shared)) <= short_path_tokens:
        local = shared + local
        shared = []
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *shared]), np.concatenate([*local, np.arange(start, stop)])


def _index(tokens: np.ndarray) -> slice | Tensor | None:
    """Consecutive tokens as a slice, which needs no copy."""
    if not len(tokens):
        return None
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return torch.from_numpy(tokens)


def _tree_mask(trie: Trie, start: int, stop: int, keys: np.ndarray, groups: int) -> Tensor:
    queries = np.arange(start, stop)[:, None]
    visible = (keys <= queries) & (queries < trie.end[keys])
    mask = torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)
    return mask.repeat_interleave(groups, dim=0)


@functools.cache
def _causal_mask(groups: int, tokens: int, before: int) -> Tensor:
    """[tokens × groups, before + tokens]: all keys before the segment, and causally its own."""
    mask = torch.zeros(tokens, before + tokens)
    mask[:, before:].masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    return mask.repeat_interleave(groups, dim=0)


def _corner(causal: Tensor, tokens: int, groups: int, keys: int) -> Tensor:
    """A view of the causal mask for `tokens` queries and the last `keys` keys up to them."""
    before = causal.shape[1] - len(causal) // groups
    return causal[: tokens * groups, before + tokens - keys : before + tokens]


class _TrieAttention(torch.autograd.Function):
    """Inside: queries [kv_heads, T × groups, dim]; keys and values [2, kv_heads, T, dim]."""

    @staticmethod
    def forward(ctx, query, key, value, blocks, scale):
        tokens, heads, dim = query.shape
        groups = heads // key.shape[1]
        q = query.view(tokens, -1, groups, dim).transpose(0, 1).reshape(-1, tokens * groups, dim)
        kv = torch.stack([key, value]).transpose(1, 2).contiguous()
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)  # [kv_heads, T × groups]
        any_shared = any(block.shared is not None for block in blocks)
        if any_shared:
            shared_out = torch.zeros_like(out)
            shared_lse = torch.full_like(lse, -torch.inf)
        for block in blocks:
            rows = slice(block.start * groups, block.stop * groups)
            inputs = _inputs(q, rows, kv, block.local)
            part_out, part_lse = _flash(*inputs, attn_mask=block.mask.to(q.dtype), scale=scale)
            out[:, rows] = part_out.squeeze(1)
            lse[:, rows] = part_lse.squeeze(1)
            if block.shared is not None:
                inputs = _inputs(q, rows, kv, block.shared)
                part_out, part_lse = _flash(*inputs, scale=scale)
                shared_out[:, rows] = part_out.squeeze(1)
                shared_lse[:, rows] = part_lse.squeeze(1)
        if any_shared:
            lse = _combine(out, lse, shared_out, shared_lse)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.blocks = blocks
        ctx.scale = scale
        return out.view(-1, tokens, groups, dim).transpose(0, 1).reshape(tokens, heads, dim)

    @staticmethod
    def backward(ctx, grad):
        q, kv, out, lse = ctx.saved_tensors
        tokens, heads, dim = grad.shape
        groups = heads // len(q)
        grad = grad.reshape(tokens, -1, groups, dim).transpose(0, 1).reshape(q.shape)
        dq = torch.empty_like(q)
        # A key gets a contribution from every block that sees it: summed in fp32.
        dk, dv = torch.zeros(kv.shape, dtype=torch.float32)  # [kv_heads, T, dim] each
        for block in ctx.blocks:
            rows = slice(block.start * groups, block.stop * groups)
            block_grad, block_out, block_lse = (t[:, rows].unsqueeze(1) for t in (grad, out, lse))
            inputs = _inputs(q, rows, kv, block.local)
            dq_part, dk_part, dv_part = _flash_backward(
                block_grad,
                *inputs,
                block_out,
                block_lse,
                0.0,  # dropout
                False,  # causal
                attn_mask=block.mask.to(q.dtype),
                scale=ctx.scale,
            )
            dq[:, rows] = dq_part.squeeze(1)
            _add(dk, block.local, dk_part.squeeze(1))
            _add(dv, block.local, dv_part.squeeze(1))
            if block.shared is not None:
                inputs = _inputs(q, rows, kv, block.shared)
                dq_part, dk_part, dv_part = _flash_backward(
                    block_grad, *inputs, block_out, block_lse, 0.0, False, scale=ctx.scale
                )
                dq[:, rows] += dq_part.squeeze(1)
                _add(dk, block.shared, dk_part.squeeze(1))
                _add(dv, block.shared, dv_part.squeeze(1))
        dq = dq.view(-1, tokens, groups, dim).transpose(0, 1).reshape(tokens, heads, dim)
        dk, dv = (t.to(q.dtype).transpose(0, 1).contiguous() for t in (dk, dv))
        return dq, dk, dv, None, None


def _inputs(
    q: Tensor, rows: slice, kv: Tensor, tokens: slice | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one kernel call, [kv_heads, 1, rows or tokens, dim] each."""
    visible = kv[:, :, tokens] if isinstance(tokens, slice) else kv.index_select(2, tokens)
    key, value = visible.unsqueeze(2)
    return q[:, rows].unsqueeze(1), key, value


def _combine(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Merge two softmaxes over disjoint keys into `out`; returns their joint log-sum-exp."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(other, (other_lse - total).exp_().unsqueeze(-1).to(out.dtype))
    return total


def _add(total: Tensor, tokens: slice | Tensor, part: Tensor) -> None:
    if isinstance(tokens, slice):
        total[:, tokens] += part
    else:
        total.index_add_(1, tokens, part.float())
