"""Context parallelism: every sequence of a micro-batch is spread over the ranks of a context group.

    padded    each sequence is padded to a multiple of 2 × size × tensor tokens
    spread    and cut into 2 × size stretches, of which rank r has the r-th from the front and the r-th from the back,
              so that causal attention costs every rank the same. Transformer Engine and Megatron's rotary embedding
              for packed sequences expect just that.
    rows      each rank computes the loss rows whose source it has; `gather_rows` brings them together, so the loss
              sees all rows of a step

Only for micro-batches that do not branch, and only with Transformer Engine's attention: not run on a GPU yet.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megastep.types import Trie


@dataclass
class Spread:
    take: np.ndarray  # [T_here] this rank's tokens, by their place in the micro-batch; -1: padding
    position: np.ndarray  # [T_padded] of all tokens, padding included: for the rotary embedding
    starts: np.ndarray  # [sequences + 1] without padding
    padded_starts: np.ndarray  # [sequences + 1]


def spread(trie: Trie, rank: int, size: int, tensor: int) -> Spread:
    if trie.branches:
        raise ValueError(
            "context parallelism needs sequences that do not branch: train.pack_layout = merge or flat"
        )
    starts = np.append(trie.sequence_starts(), len(trie))
    unit = 2 * size * tensor
    lengths = np.diff(starts)
    padded = -(-lengths // unit) * unit
    position = np.concatenate([np.arange(n) for n in padded]).astype(np.int32)
    take = []
    for start, length, whole in zip(starts, lengths, padded):
        stretch = whole // (2 * size)
        for which in (rank, 2 * size - 1 - rank):
            at = np.arange(which * stretch, (which + 1) * stretch)
            take.append(np.where(at < length, start + at, -1))
    return Spread(np.concatenate(take), position, starts, np.append(0, np.cumsum(padded)))


def taken(column: np.ndarray, take: np.ndarray, padding: int) -> np.ndarray:
    """A column of the micro-batch's tokens on this rank."""
    out = column[take]
    out[take < 0] = padding
    return out


def rows_here(src: np.ndarray, take: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which loss rows have their source on this rank, and where it is here."""
    here = np.flatnonzero(take >= 0)
    place = dict(zip(take[here].tolist(), here.tolist()))
    rows = np.flatnonzero(np.isin(src, take[here]))
    return rows, np.array([place[s] for s in src[rows].tolist()], np.int32)


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
