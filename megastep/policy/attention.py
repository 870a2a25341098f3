"""Attention over a trie: the modules that Megatron calls, and the choice of the kernel.

Token `k` is visible to token `q` iff `k <= q < end[k]`, in depth-first order.

    CPU       cpu_attention.py      torch's flash kernel, on blocks against their root path
    PACKED    Transformer Engine    CUDA, sequences without branches
    FLEX      flex_attention.py     CUDA, FlexAttention with that predicate
    TRITON    triton_attention.py   CUDA, kernels of this project; imported only when chosen

Rotary embedding. The frequencies are those of each token's position, so Megatron needs no sequence
boundaries: it is given the layout `sbhd` with a batch of one. Its rotary embedding for packed
sequences (`thd`) would read their lengths back from the GPU, sequence by sequence in every layer.
"""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megastep.policy import cpu_attention, flex_attention
from megastep.types import Trie


class Kernel(Enum):
    CPU = auto()
    PACKED = auto()
    FLEX = auto()
    TRITON = auto()


def kernel_for(setting: str, device_type: str, branches: bool) -> Kernel:
    """The kernel of a micro-batch. setting: policy.attention, which is for CUDA.

    auto takes the packed kernel where it can, as it is the fastest. For tries that branch it takes
    FlexAttention, which torch tests on GPUs, until the Triton kernel has run on one.
    """
    if device_type == "cpu":
        return Kernel.CPU
    if setting == "auto":
        return Kernel.FLEX if branches else Kernel.PACKED
    return {"flex": Kernel.FLEX, "triton": Kernel.TRITON}[setting]


@dataclass
class TrieParams(PackedSeqParams):
    """The trie in the form of the chosen kernel; Megatron passes it through its layers.

    Megatron reads `qkv_format` only. One of the other fields is set.
    """

    qkv_format: str = "sbhd"
    blocks: list[cpu_attention.Block] | None = None
    sequences: PackedSeqParams | None = None
    block_mask: flex_attention.BlockMask | None = None
    triton_blocks: object | None = None  # triton_attention.TrieBlocks


def trie_params(trie: Trie, groups: int, device: torch.device, setting: str) -> TrieParams:
    """Built once per micro-batch for all layers.

    groups: query heads per key head; setting: policy.attention.
    """
    kernel = kernel_for(setting, device.type, trie.branches)
    if kernel == Kernel.CPU:
        return TrieParams(blocks=cpu_attention.blocks_of(trie, groups))
    if kernel == Kernel.PACKED:
        starts = np.append(trie.sequence_starts(), len(trie))
        return TrieParams(sequences=packed_sequences(starts, device))
    if kernel == Kernel.FLEX:
        return TrieParams(block_mask=flex_attention.block_mask(trie, device))
    from megastep.policy import triton_attention

    return TrieParams(triton_blocks=triton_attention.trie_blocks(trie, device))


def packed_sequences(
    starts: np.ndarray, device: torch.device, padded_starts: np.ndarray | None = None
) -> PackedSeqParams:
    """For Transformer Engine; both arrays are [sequences + 1] and end with the total length.

    padded_starts: the starts after padding, for context parallelism.
    """
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    cu_seqlens_padded = None
    longest = int(np.diff(starts).max())
    if padded_starts is not None:
        cu_seqlens_padded = torch.tensor(padded_starts, dtype=torch.int32, device=device)
        longest = int(np.diff(padded_starts).max())
    return PackedSeqParams(
        "thd",
        cu_seqlens,
        cu_seqlens,
        cu_seqlens_padded,
        cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class TrieAttention(torch.nn.Module):
    """Core attention of the CPU spec; Megatron's unfused attention has no packed sequences."""

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
        """query [T, 1, heads, dim]; key, value [T, 1, kv_heads, dim] → [T, 1, heads × dim]."""
        if not isinstance(packed_seq_params, TrieParams):
            raise ValueError("TrieAttention needs packed_seq_params from trie_params")
        blocks = packed_seq_params.blocks
        assert blocks is not None, "trie_params sets it on CPU"
        query, key, value = (t.squeeze(1) for t in (query, key, value))
        out = cpu_attention.attend(query, key, value, blocks, self.scale)
        return out.reshape(len(out), 1, -1)


class CudaTrieAttention(torch.nn.Module):
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
        """query [T, 1, heads, dim]; key, value [T, 1, kv_heads, dim] → [T, 1, heads × dim]."""
        assert isinstance(packed_seq_params, TrieParams), "PolicyBatch carries it"
        query, key, value = (t.squeeze(1) for t in (query, key, value))
        sequences = packed_seq_params.sequences
        if sequences is not None:
            out = self.packed(
                query, key, value, attention_mask, attn_mask_type, attention_bias, sequences
            )
        else:
            out = self._attend(query, key, value, packed_seq_params)
        return out.reshape(len(out), 1, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, params: TrieParams) -> Tensor:
        if params.block_mask is not None:
            return flex_attention.attend(query, key, value, params.block_mask, self.scale)
        from megastep.policy import triton_attention

        blocks = params.triton_blocks
        assert isinstance(blocks, triton_attention.TrieBlocks), "trie_params sets it"
        return triton_attention.attend(query, key, value, blocks, self.scale)
