"""Which blocks of a trie's tokens see which, for the block-sparse kernels on CUDA.

A pair of blocks, queries against keys, is

    full         every query sees every key: computed without a mask
    partial      some do: computed under the predicate `key <= query < end[key]`
    invisible    none does: skipped

Keys of an earlier block precede every query of the block, so that their ends alone decide: the
latest whether any key is visible, the earliest whether all are. O(blocks²), no [tokens, tokens].
"""

from dataclasses import dataclass

import numpy as np

from megastep.types import Trie


@dataclass
class VisibleBlocks:
    """[blocks, blocks] each: block of queries × block of keys."""

    partial: np.ndarray  # bool
    full: np.ndarray  # bool


def visible_blocks(trie: Trie, block_tokens: int) -> VisibleBlocks:
    """block_tokens: at least 2. An incomplete last block of queries has no full pair.

    Example: the trie of types.py, with block_tokens = 2.

        keys      0 1   2 3   4 5   6 7        p partial, f full
        0 1        p
        2 3        f     p
        4 5        f           p
        6 7        f           f     p
    """
    starts = np.arange(0, len(trie), block_tokens)
    latest_end = np.maximum.reduceat(trie.end, starts)
    earliest_end = np.minimum.reduceat(trie.end, starts)
    query_starts = starts[:, None]
    earlier = starts < query_starts
    itself = starts == query_starts
    visible = itself | (earlier & (latest_end > query_starts))
    full = earlier & (earliest_end >= query_starts + block_tokens)
    return VisibleBlocks(visible & ~full, full)
