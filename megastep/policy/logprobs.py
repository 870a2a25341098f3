"""Logprob and entropy of the loss rows; the output layer and the softmax run on no other token.

    hidden [T/tp, h]  ─ rows of the distinct sources, from the rank that has them ─►  [U, h]
                      ─ per chunk: logits [c, V/tp], reduced over the vocabulary ─►  logprob [N]
                                                                                     entropy [N]

Memory: the logits of one chunk, and the exponentials of the last `kept_rows` sources, which forward
keeps; backward recomputes the logits of the other chunks. A micro-batch of at most `kept_rows`
sources recomputes nothing.

Padding columns of the vocabulary are left out of the product and get no probability or gradient.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megastep.types import LossTable

CHUNK_ROWS = 512  # large enough for the product, small enough for a CPU's cache


@dataclass(frozen=True)
class Chunk:
    """A range of sources, and the range of loss rows that they predict."""

    sources: slice
    rows: slice


@dataclass
class LogitRows:
    """The rows of a loss table, sorted by source and divided into chunks of sources.

    Example: a loss table with src [4, 2, 2] and target [a, b, c].

        src          [2, 4]        one row of logits each
        source       [0, 0, 1]     the sorted loss rows: b and c from token 2, a from token 4
        target       [b, c, a]
        to_table     [2, 0, 1]     the first row of the table is row 2 here
    """

    src: Tensor  # [U] distinct tokens of the trie, ascending
    source: Tensor  # [N] index into src, ascending
    target: Tensor  # [N]
    to_table: Tensor  # [N] table row r is row to_table[r] here
    chunks: list[Chunk]
    kept_chunks: int  # how many of the last chunks keep their exponentials for backward


def logit_rows(loss: LossTable, kept_rows: int, device: torch.device) -> LogitRows:
    chunk_rows = min(CHUNK_ROWS, kept_rows)
    order = np.argsort(loss.src, kind="stable")
    to_table = np.empty_like(order)
    to_table[order] = np.arange(len(order))
    src, source = np.unique(loss.src[order], return_inverse=True)
    source_bounds = [*range(0, len(src), chunk_rows), len(src)]
    row_bounds = np.searchsorted(source, source_bounds).tolist()
    chunks = [
        Chunk(slice(*source_bounds[i : i + 2]), slice(*row_bounds[i : i + 2]))
        for i in range(len(source_bounds) - 1)
    ]

    def on_device(column: np.ndarray) -> Tensor:
        return torch.from_numpy(column.astype(np.int64)).to(device)

    return LogitRows(
        src=on_device(src),
        source=on_device(source),
        target=on_device(loss.target[order]),
        to_table=on_device(to_table),
        chunks=chunks,
        kept_chunks=kept_rows // chunk_rows,
    )


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the output layer."""

    first: int  # token id of its first row
    real: int  # its rows that are tokens; the others are padding
    group: dist.ProcessGroup  # the ranks with the other shards


def row_logprobs(
    hidden: Tensor,
    weight: Tensor,
    rows: LogitRows,
    shard: VocabShard,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy, [N] fp32 each, in the order of the loss table.

    hidden [T or T/tp, h]: with tensor parallelism, each rank's shard of the sequence.
    """
    source_hidden = _SourceRows.apply(hidden, rows.src, shard.group)
    logprob, entropy = _Head.apply(source_hidden, weight, rows, shard, temperature)
    if not entropy_gradient:
        entropy = entropy.detach()  # saves a pass over the logits
    return logprob[rows.to_table], entropy[rows.source][rows.to_table]


class _SourceRows(torch.autograd.Function):
    """Rows of a sequence that is sharded over the group, gathered on every rank: [U, h]."""

    @staticmethod
    def forward(ctx, hidden, src, group):
        ctx.shape = hidden.shape
        ctx.group = group
        if group.size() == 1:
            ctx.here = None
            ctx.at = src
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
        if ctx.here is not None:  # each rank has the gradient of its vocabulary shard
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
            grad = grad[ctx.here]
        d_hidden = grad.new_zeros(ctx.shape)
        d_hidden[ctx.at] = grad  # sources are distinct
        return d_hidden, None, None


@dataclass
class _Targets:
    """The loss rows of a chunk."""

    source: Tensor  # [n] index of the row's source in the chunk
    column: Tensor  # [n] column of the row's target in this rank's shard
    here: Tensor  # [m] the rows whose column is in range; the others are on other ranks


@dataclass
class _Softmax:
    """The distributions of a chunk's sources: p = exp / total."""

    exp: Tensor  # [c, V/tp] exp(logits - max), this rank's shard
    total: Tensor  # [c] sum of exp over the whole vocabulary
    entropy: Tensor  # [c]


class _Head(torch.autograd.Function):
    """Logprob [N] of each row's target and entropy [U] of each source, in LogitRows order."""

    @staticmethod
    def forward(ctx, hidden, weight, rows, shard, temperature):
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.shard, ctx.temperature = rows, shard, temperature
        logprob = hidden.new_empty(len(rows.target), dtype=torch.float32)
        entropy = hidden.new_empty(len(rows.src), dtype=torch.float32)
        total = torch.empty_like(entropy)  # [U]
        ctx.kept_exp = []  # [c, V/tp] of each of the last chunks
        first_kept = len(rows.chunks) - rows.kept_chunks
        for i, chunk in enumerate(rows.chunks):
            targets = _targets(rows, chunk, shard)
            softmax, logprob[chunk.rows] = _chunk_softmax(
                hidden[chunk.sources], weight, targets, shard, temperature
            )
            total[chunk.sources] = softmax.total
            entropy[chunk.sources] = softmax.entropy
            if i >= first_kept and any(ctx.needs_input_grad):
                ctx.kept_exp.append(softmax.exp)
            del softmax  # frees the logits before the next chunk
        ctx.save_for_backward(hidden, weight, total, entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx, d_logprob, d_entropy):
        hidden, weight, total, entropy = ctx.saved_tensors
        rows, shard, temperature = ctx.rows, ctx.shard, ctx.temperature
        d_hidden = torch.empty_like(hidden)
        d_weight = weight.new_zeros(weight.shape, dtype=torch.float32)
        for chunk in reversed(rows.chunks):
            targets = _targets(rows, chunk, shard)
            chunk_hidden = hidden[chunk.sources]
            if ctx.kept_exp:
                exp = ctx.kept_exp.pop()
            else:
                exp = _chunk_softmax(chunk_hidden, weight, targets, shard, temperature)[0].exp
            d_logits = _d_logits(
                _Softmax(exp, total[chunk.sources], entropy[chunk.sources]),
                targets,
                None if d_logprob is None else d_logprob[chunk.rows],
                None if d_entropy is None else d_entropy[chunk.sources],
            )
            if temperature != 1.0:
                d_logits /= temperature
            d_logits = d_logits.to(weight.dtype)
            d_hidden[chunk.sources] = d_logits @ weight[: shard.real]
            _add_product(d_weight[: shard.real], d_logits.t(), chunk_hidden)
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def _targets(rows: LogitRows, chunk: Chunk, shard: VocabShard) -> _Targets:
    column = rows.target[chunk.rows] - shard.first
    here = ((column >= 0) & (column < shard.real)).nonzero().squeeze(1)
    return _Targets(rows.source[chunk.rows] - chunk.sources.start, column, here)


def _chunk_softmax(
    hidden: Tensor, weight: Tensor, targets: _Targets, shard: VocabShard, temperature: float
) -> tuple[_Softmax, Tensor]:
    """The softmax of a chunk's hidden states [c, h], and the logprob [n] of its targets."""
    logits = (hidden @ weight[: shard.real].t()).float()  # [c, V/tp]
    if temperature != 1.0:
        logits /= temperature
    if shard.real:
        largest = logits.amax(-1)
    else:
        largest = logits.new_full(logits.shape[:1], -torch.inf)
    if shard.group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
    logits -= largest.unsqueeze(1)
    here = targets.here
    target_logit = torch.zeros_like(targets.source, dtype=torch.float32)  # [n]
    target_logit[here] = logits[targets.source[here], targets.column[here]]
    exp = logits.exp()
    # One reduction for the three sums over the vocabulary; logits × exp overwrites the logits.
    sums = torch.cat([exp.sum(-1), logits.mul_(exp).sum(-1), target_logit])
    if shard.group.size() > 1:
        dist.all_reduce(sums, group=shard.group)
    total, logit_exp, target_logit = sums.split([len(exp), len(exp), len(target_logit)])
    log_total = total.log()
    entropy = log_total - logit_exp / total
    return _Softmax(exp, total, entropy), target_logit - log_total[targets.source]


def _d_logits(
    softmax: _Softmax, targets: _Targets, d_logprob: Tensor | None, d_entropy: Tensor | None
) -> Tensor:
    """[c, V/tp], in the memory of `softmax.exp`.

    d logprob / d logits = [target] - p        d entropy / d logits = -p (log p + entropy)
    """
    exp, total = softmax.exp, softmax.total
    if d_logprob is None:
        d_logprob = exp.new_zeros(len(targets.source))
    d_source = torch.zeros_like(total).index_add_(0, targets.source, d_logprob)  # [c]
    through_entropy = None
    if d_entropy is not None:
        p = exp / total.unsqueeze(1)
        through_entropy = torch.xlogy(p, p).addcmul_(p, softmax.entropy.unsqueeze(1))
        through_entropy.mul_(d_entropy.unsqueeze(1))
    d_logits = exp.mul_((-d_source / total).unsqueeze(1))
    here = targets.here
    at_targets = (targets.source[here], targets.column[here])
    d_logits.index_put_(at_targets, d_logprob[here], accumulate=True)
    if through_entropy is not None:
        d_logits.sub_(through_entropy)
    return d_logits


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in fp32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
