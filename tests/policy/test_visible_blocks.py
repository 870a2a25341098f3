"""X1: full, partial and invisible pairs of blocks are those of the predicate for tokens."""

import numpy as np
import pytest

from megastep.policy.visible_blocks import visible_blocks
from megastep.types import Trie
from tests.policy.tries import random_trie, sequences, visible, worked_example


def by_tokens(trie: Trie, block_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Partial and full pairs; an incomplete last block is padded with invisible pairs."""
    blocks = -(-len(trie) // block_tokens)
    pairs = np.zeros((blocks * block_tokens,) * 2, bool)
    pairs[: len(trie), : len(trie)] = visible(trie).numpy()
    tiles = pairs.reshape(blocks, block_tokens, blocks, block_tokens)
    full = tiles.all(axis=(1, 3))
    return tiles.any(axis=(1, 3)) & ~full, full


def test_the_worked_example():
    """The example in the docstring of visible_blocks."""
    blocks = visible_blocks(worked_example(), 2)
    assert blocks.partial.astype(int).tolist() == np.eye(4, dtype=int).tolist()
    expected = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]]
    assert blocks.full.astype(int).tolist() == expected


@pytest.mark.parametrize("block_tokens", [2, 16, 64, 128])
def test_x1_blocks_are_those_of_the_predicate(block_tokens):
    kinds = np.zeros(3, int)
    tries = [random_trie(seed, tokens=137 * seed + 1, branch_rate=0.05) for seed in range(10)]
    tries += [random_trie(seed, tokens=137 * seed + 1, branch_rate=0.005) for seed in range(10)]
    tries += [sequences(1), sequences(block_tokens), sequences(300, 1, 77, 128)]
    for trie in tries:
        blocks = visible_blocks(trie, block_tokens)
        partial, full = by_tokens(trie, block_tokens)
        assert np.array_equal(blocks.partial, partial)
        assert np.array_equal(blocks.full, full)
        invisible = np.tril(~partial & ~full)
        kinds += [partial.sum(), full.sum(), invisible.sum()]
    assert (kinds > 10).all()
