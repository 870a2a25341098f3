"""Attention over a trie.

Token `k` is visible to token `q` iff `k <= q < end[k]`, in depth-first order.

    CPU     blocks of consecutive tokens, each against its root path: cpu_attention.py
    CUDA    FlexAttention with that predicate; Transformer Engine's packed kernel for tries that
            do not branch
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megastep.policy import cpu_attention
from megastep.types import Trie


@dataclass
class TrieParams(PackedSeqParams):
    """The trie in the form the attention kernels need; Megatron passes it through its layers."""

    blocks: list[cpu_attention.Block] | None = None  # CPU
    block_mask: object | None = None  # CUDA, for tries that branch


def trie_params(trie: Trie, groups: int, device: torch.device) -> TrieParams:
    """Built once per micro-batch for all layers. groups: query heads per key head."""
    branches = trie.branches
    # Transformer Engine needs the sequence boundaries. Elsewhere one sequence is declared, so that
    # Megatron's rotary embedding takes its frequencies per token.
    if device.type == "cuda" and not branches:
        starts = trie.sequence_starts()
    else:
        starts = np.zeros(1, int)
    params = packed_params(np.append(starts, len(trie)), device)
    if device.type == "cpu":
        params.blocks = cpu_attention.blocks_of(trie, groups)
    elif branches:
        params.block_mask = _flex_mask(trie, device)
    return params


def packed_params(
    starts: np.ndarray, device: torch.device, padded_starts: np.ndarray | None = None
) -> TrieParams:
    """Packed sequences; both arrays are [sequences + 1] and end with the total length.

    padded_starts: the starts after padding, for context parallelism.
    """
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    cu_seqlens_padded = None
    longest = int(np.diff(starts).max())
    if padded_starts is not None:
        cu_seqlens_padded = torch.tensor(padded_starts, dtype=torch.int32, device=device)
        longest = int(np.diff(padded_starts).max())
    return TrieParams(
        "thd",
        cu_seqlens,
        cu_seqlens,
        cu_seqlens_padded,
        cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class TrieAttention(torch.nn.Module):
    """Core attention of the CPU spec; Megatron's unfused attention rejects packed sequences."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused):
        # Megatron's builder also passes layer_number, mask type, attention type and groups.
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: TrieParams | None = None,
    ) -> Tensor:
        """query [T, heads, dim]; key, value [T, kv_heads, dim] → [T, heads, dim]."""
        if not isinstance(packed_seq_params, TrieParams):
            raise ValueError("TrieAttention needs packed_seq_params from trie_params")
        blocks = packed_seq_params.blocks
        assert blocks is not None, "trie_params sets it on CPU"
        return cpu_attention.attend(query, key, value, blocks, self.scale)


class FlexTrieAttention(torch.nn.Module):
    """Core attention of the CUDA spec. Not run on a GPU yet.

    Written against torch 2.13 and Transformer Engine 2.11.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        softmax_scale=None,
        **more,
    ):
        super().__init__()
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.scale = softmax_scale or config.kv_channels**-0.5
        self.packed = TEDotProductAttention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            softmax_scale=softmax_scale,
            **more,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: TrieParams | None = None,
    ) -> Tensor:
        """query [T, heads, dim]; key, value [T, kv_heads, dim] → [T, heads, dim]."""
        assert packed_seq_params is not None, "PolicyBatch carries it"
        if packed_seq_params.block_mask is None:
            return self.packed(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        # [1, heads, T, dim] each
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        out = _compiled_flex()(
            q, k, v, block_mask=packed_seq_params.block_mask, scale=self.scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled_flex():
    """Compiled once for all layers; dynamic, since every micro-batch has another length."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _compiled_block_mask():
    """Compiled, since the eager function builds the dense mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=True)


def _flex_mask(trie: Trie, device: torch.device):
    end = torch.from_numpy(trie.end).to(device)

    def visible(batch, head, q, k):
        return (k <= q) & (q < end[k])

    return _compiled_block_mask()(visible, None, None, len(trie), len(trie), device=device)
