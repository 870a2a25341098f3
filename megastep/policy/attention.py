"""Core attention of the CPU spec: causal, grouped queries, through torch's SDPA.

Megatron's own unfused `DotProductAttention` builds the [heads, T, T] scores and wants a mask tensor;
SDPA's CPU kernel needs neither.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class CausalAttention(torch.nn.Module):
    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused):
        # Megatron's builder also passes layer_number, mask type, attention type and groups.
        super().__init__()
        self.scale = softmax_scale
        self.dropout = config.attention_dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, attn_mask_type=None,
                attention_bias=None, packed_seq_params=None) -> Tensor:
        """query [s, b, heads, dim]; key, value [s, b, kv_heads, dim] → [s, b, heads·dim]."""
        if attention_mask is not None or packed_seq_params is not None:
            raise ValueError("CausalAttention takes whole causal sequences: no mask, no packing")
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, dim]
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=key.shape[1] != query.shape[1],
            dropout_p=self.dropout if self.training else 0.0,
        )
        return out.permute(2, 0, 1, 3).flatten(2)
