"""Attention over a trie by torch's FlexAttention. Not run on a GPU yet; written for torch 2.13.

The BlockMask comes straight from the trie: torch's create_block_mask evaluates the predicate for
all pairs of tokens.
"""

import functools

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megastep.policy.visible_blocks import visible_blocks
from megastep.types import Trie

BLOCK_TOKENS = 128  # the default of create_block_mask


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """query [T, heads, dim]; key, value [T, kv_heads, dim] → [T, heads, dim]."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))  # [1, heads, T, dim]
    out = _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled():
    """Compiled once for all layers; dynamic, since every micro-batch has another length.

    fullgraph: beyond its recompile limit torch raises, where else it would run the eager function,
    which builds scores of [heads, T, T].
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def block_mask(trie: Trie, device: torch.device) -> BlockMask:
    blocks = visible_blocks(trie, BLOCK_TOKENS)
    end = torch.from_numpy(trie.end).to(device)

    def visible(batch, head, query, key):
        return (key <= query) & (query < end[key])

    return BlockMask.from_kv_blocks(
        *_listed(blocks.partial, device),
        *_listed(blocks.full, device),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=visible,
        seq_lengths=(len(trie), len(trie)),
    )


def _listed(mask: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Key blocks of each query block: how many [1, 1, n], and their indices first [1, 1, n, n]."""
    counts = mask.sum(axis=1, dtype=np.int32)
    indices = np.argsort(~mask, axis=1, kind="stable").astype(np.int32)
    return (
        torch.from_numpy(counts).to(device)[None, None],
        torch.from_numpy(indices).to(device)[None, None],
    )
