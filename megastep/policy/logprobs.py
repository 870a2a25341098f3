"""Logprob and entropy of the loss table's rows; the head and the softmax run on no other token.

    hidden [T/tp, h]  ─ rows of the distinct sources, from whichever rank has them ─►  [U, h]
                      ─ chunk by chunk: logits [c, V/tp], reduced over the vocabulary ─►  logprob [N], entropy [N]

Memory: the logits of one chunk, and the exponentials of the last `kept_rows` sources, which forward leaves behind;
backward computes the other chunks' logits again. So a micro-batch that fits in `kept_rows` computes nothing twice.

Columns that pad the vocabulary are left out of the product, so they get neither probability nor gradient.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megastep.types import LossTable

CHUNK_ROWS = 512  # large enough for the product, small enough for a CPU's cache


@dataclass
class HeadRows:
    """The rows of a loss table by ascending source, cut into chunks of sources."""

    src: Tensor  # [U] distinct, ascending
    of_row: Tensor  # [N] index into src, ascending
    target: Tensor  # [N]
    to_table: Tensor  # [N] table row r is row to_table[r] here
    chunks: list[tuple[slice, slice]]  # (of src, of rows)
    kept: int  # how many of the last chunks keep their exponentials for backward


def head_rows(loss: LossTable, kept_rows: int, device: torch.device) -> HeadRows:
    chunk_rows = min(CHUNK_ROWS, kept_rows)
    order = np.argsort(loss.src, kind="stable")
    src, of_row = np.unique(loss.src[order], return_inverse=True)
    starts = list(range(0, len(src), chunk_rows)) + [len(src)]
    rows = np.searchsorted(of_row, starts).tolist()
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    on_device = [
        torch.from_numpy(a.astype(np.int64)).to(device)
        for a in (src, of_row, loss.target[order], inverse)
    ]
    chunks = [(slice(*s), slice(*r)) for s, r in zip(zip(starts, starts[1:]), zip(rows, rows[1:]))]
    return HeadRows(*on_device, chunks, kept=kept_rows // chunk_rows)


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of the head."""

    first: int  # the token id of its first row
    real: int  # its rows that are tokens; the others pad
    group: dist.ProcessGroup  # of the ranks that have the other parts


def row_logprobs(
    hidden: Tensor,
    weight: Tensor,
    rows: HeadRows,
    shard: VocabShard,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy [N] fp32 of the table's rows.

    hidden [T or T/tp, h]: with tensor parallelism, each rank's stretch of the sequence.
    """
    of_src = _SourceRows.apply(hidden, rows.src, shard.group)
    logprob, entropy = _Head.apply(of_src, weight, rows, shard, temperature)
    if not entropy_gradient:
        entropy = entropy.detach()  # saves a pass over the logits
    return logprob[rows.to_table], entropy[rows.of_row][rows.to_table]


class _SourceRows(torch.autograd.Function):
    """Rows of a sequence that is spread over the group, on every rank: [U, h]."""

    @staticmethod
    def forward(ctx, hidden, src, group):
        ctx.shape, ctx.group = hidden.shape, group
        if group.size() == 1:
            ctx.here, ctx.at = None, src
            return hidden[src]
        at = src - group.rank() * len(hidden)
        ctx.here = ((at >= 0) & (at < len(hidden))).nonzero().squeeze(1)
        ctx.at = at[ctx.here]
        out = hidden.new_zeros(len(src), hidden.shape[1])
        out[ctx.here] = hidden[ctx.at]
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        if ctx.here is not None:  # each rank has the part of its own vocabulary
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
            grad = grad[ctx.here]
        hidden = grad.new_zeros(ctx.shape)
        hidden[ctx.at] = grad  # sources are distinct
        return hidden, None, None


class _Head(torch.autograd.Function):
    """Logprob [N] of each row's target and entropy [U] of each source, in the order of HeadRows."""

    @staticmethod
    def forward(ctx, hidden, weight, rows, shard, temperature):
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.shard, ctx.temperature = rows, shard, temperature
        logprob = hidden.new_empty(len(rows.target), dtype=torch.float32)
        entropy = hidden.new_empty(len(rows.src), dtype=torch.float32)
        total = torch.empty_like(entropy)  # [U] of the exponentials
        ctx.kept = []  # exponentials of the last chunks
        for i, (s, r) in enumerate(rows.chunks):
            e, total[s], logprob[r], entropy[s] = _chunk(
                hidden[s], weight, rows, s, r, shard, temperature
            )
            if i >= len(rows.chunks) - rows.kept and any(ctx.needs_input_grad):
                ctx.kept.append(e)
            del e  # before the next chunk is there
        ctx.save_for_backward(hidden, weight, total, entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx, d_logprob, d_entropy):
        hidden, weight, total, entropy = ctx.saved_tensors
        rows, shard = ctx.rows, ctx.shard
        d_hidden = torch.empty_like(hidden)
        d_weight = weight.new_zeros(weight.shape, dtype=torch.float32)
        for s, r in reversed(rows.chunks):
            if ctx.kept:
                e = ctx.kept.pop()
            else:
                e, *_ = _chunk(hidden[s], weight, rows, s, r, shard, ctx.temperature)
            d = _d_logits(
                e,
                total[s],
                entropy[s],
                rows,
                s,
                r,
                shard,
                None if d_logprob is None else d_logprob[r],
                None if d_entropy is None else d_entropy[s],
            )
            if ctx.temperature != 1.0:
                d /= ctx.temperature
            d = d.to(weight.dtype)
            d_hidden[s] = d @ weight[: shard.real]
            _add_product(d_weight[: shard.real], d.t(), hidden[s])
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def _chunk(hidden, weight, rows, s, r, shard, temperature) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp(logits - max) [c, V/tp], its sum over the vocabulary [c], logprob of the rows, entropy [c]."""
    z = (hidden @ weight[: shard.real].t()).float()
    if temperature != 1.0:
        z /= temperature
    top = z.amax(-1) if shard.real else z.new_full(z.shape[:1], -torch.inf)
    if shard.group.size() > 1:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.group)
    z -= top.unsqueeze(1)
    of_row, column, here = _targets(rows, s, r, shard)
    target = torch.zeros_like(of_row, dtype=torch.float32)
    target[here] = z[of_row[here], column[here]]
    e = z.exp()
    sums = torch.cat([e.sum(-1), z.mul_(e).sum(-1), target])
    if shard.group.size() > 1:
        dist.all_reduce(sums, group=shard.group)
    total, product, target = sums.split([len(z), len(z), len(target)])
    log_total = total.log()
    return e, total, target - log_total[of_row], log_total - product / total


def _targets(
    rows: HeadRows, s: slice, r: slice, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows of a chunk: their place in it, their column in this shard, and which ones have one."""
    column = rows.target[r] - shard.first
    return (
        rows.of_row[r] - s.start,
        column,
        ((column >= 0) & (column < shard.real)).nonzero().squeeze(1),
    )


def _d_logits(e, total, entropy, rows, s, r, shard, d_logprob, d_entropy) -> Tensor:
    """In the place of `e`. With p = e / total: d logprob = [target] - p, d entropy = -p (log p + entropy)."""
    of_row, column, here = _targets(rows, s, r, shard)
    d_logprob = e.new_zeros(len(of_row)) if d_logprob is None else d_logprob
    of_source = torch.zeros_like(total).index_add_(0, of_row, d_logprob)
    through_entropy = None
    if d_entropy is not None:
        p = e / total.unsqueeze(1)
        through_entropy = (
            torch.xlogy(p, p).addcmul_(p, entropy.unsqueeze(1)).mul_(d_entropy.unsqueeze(1))
        )
    d = e.mul_((-of_source / total).unsqueeze(1))
    d.index_put_((of_row[here], column[here]), d_logprob[here], accumulate=True)
    return d if through_entropy is None else d.sub_(through_entropy)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added up in fp32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
