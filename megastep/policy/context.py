"""Context parallelism: every sequence of a micro-batch is sharded over a context group.

    padding   each sequence is padded to a multiple of 2 × size × tensor tokens
    chunks    and divided into 2 × size chunks. Rank r has chunk r from the front and chunk r from
              the back, so that causal attention costs every rank the same. Transformer Engine
              expects this order.
    rows      each rank computes the loss rows whose source it has; `gather_rows` collects them, so
              that the loss sees all rows of a step

Only for micro-batches that do not branch, and only with Transformer Engine's attention: not run on
a GPU yet.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megastep.types import Trie


@dataclass
class ContextShard:
    """One rank's tokens of a micro-batch.

    Example: one sequence of 7 tokens, size 2, padded to 8 and divided into 4 chunks.

        rank 0   take  0 1 6 -1         rank 1   take  2 3 4 5
                 position  0 1 6 7               position  2 3 4 5
    """

    take: np.ndarray  # [T_here] indices into the micro-batch's tokens; -1: padding
    position: np.ndarray  # [T_here] in the sequence, padding included: for the rotary embedding
    starts: np.ndarray  # [sequences + 1] without padding
    padded_starts: np.ndarray  # [sequences + 1]


def shard_sequences(trie: Trie, rank: int, size: int, tensor: int) -> ContextShard:
    if trie.branches:
        raise ValueError(
            "context parallelism needs sequences without branches: train.pack_layout = merge or "
            "flat"
        )
    starts = np.append(trie.sequence_starts(), len(trie))
    multiple = 2 * size * tensor
    lengths = np.diff(starts)
    padded_lengths = -(-lengths // multiple) * multiple
    take = []
    position = []
    for start, length, padded_length in zip(starts, lengths, padded_lengths):
        chunk_tokens = padded_length // (2 * size)
        for chunk in (rank, 2 * size - 1 - rank):
            offset = np.arange(chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
            take.append(np.where(offset < length, start + offset, -1))
            position.append(offset)
    return ContextShard(
        take=np.concatenate(take),
        position=np.concatenate(position).astype(np.int32),
        starts=starts,
        padded_starts=np.append(0, np.cumsum(padded_lengths)),
    )


def take_tokens(column: np.ndarray, take: np.ndarray, padding: int) -> np.ndarray:
    """This rank's part of a column of the micro-batch's tokens."""
    out = column[take]
    out[take < 0] = padding
    return out


def own_rows(src: np.ndarray, take: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The loss rows whose source is on this rank, and the index of each source here."""
    here = np.flatnonzero(take >= 0)
    index_here = dict(zip(take[here].tolist(), here.tolist()))
    rows = np.flatnonzero(np.isin(src, take[here]))
    return rows, np.array([index_here[s] for s in src[rows].tolist()], np.int32)


class gather_rows(torch.autograd.Function):
    """Values [2, n] of this rank's rows → [2, N] of all rows, on every rank of the group."""

    @staticmethod
    def forward(ctx, values: Tensor, rows: Tensor, count: int, group) -> Tensor:
        ctx.rows = rows
        out = values.new_zeros(2, count)
        out[:, rows] = values
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[:, ctx.rows], None, None, None
