"""Random tries, and attention over them with a dense mask."""

import numpy as np
import torch
from torch import Tensor

from megastep.types import LossTable, Trie


def random_trie(seed: int, tokens: int, branch_rate: float = 0.02) -> Trie:
    """A forest: before some tokens the path goes back to a random ancestor, or to a new root."""
    random = np.random.default_rng(seed)
    position = np.zeros(tokens, np.int32)
    end = np.full(tokens, tokens, np.int32)
    path: list[int] = []  # ancestors of the next token
    for token in range(tokens):
        if random.random() < branch_rate:
            keep = random.integers(0, len(path) + 1)
            end[path[keep:]] = token
            del path[keep:]
        position[token] = len(path)
        path.append(token)
    return trie_of(position, end)


def sequences(*lengths: int) -> Trie:
    """Packed sequences without branches."""
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    end = np.repeat(np.cumsum(lengths), lengths).astype(np.int32)
    return trie_of(position, end)


def worked_example() -> Trie:
    """The trie of types.py."""
    position = np.array([0, 1, 2, 3, 2, 3, 4, 5], np.int32)
    return trie_of(position, end=np.array([8, 8, 4, 4, 8, 8, 8, 8], np.int32))


def trie_of(position: np.ndarray, end: np.ndarray) -> Trie:
    none = np.zeros(0, np.int32)
    return Trie(np.zeros(len(end), np.int32), position, end, LossTable(*[none] * 8))


def visible(trie: Trie) -> Tensor:
    """[T, T], query × key: the predicate of attention.py."""
    index = torch.arange(len(trie))
    end = torch.from_numpy(trie.end.astype(np.int64))
    return (index[None] <= index[:, None]) & (index[:, None] < end[None])


def dense(query: Tensor, key: Tensor, value: Tensor, trie: Trie, scale: float) -> Tensor:
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~visible(trie), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)
