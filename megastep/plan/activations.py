"""Activation memory per token: what each layer keeps until backward, and its peak during backward.

Counted operation by operation, from what autograd saves in the layers of policy/model.py:

    CUDA    Transformer Engine's fused norms, activations and grouped experts
    CPU     Megatron's local layers, which save intermediate results; measured, see tests/plan/

On CUDA a dense layer adds up to the formula of Korthikanti et al. (Reducing Activation
Recomputation in Large Transformer Models, 2022), as in Megatron-LM's estimate, without dropout,
plus rotary embeddings and norms of queries and keys. Routers are assumed to balance tokens over
experts.
"""

from dataclasses import dataclass
from functools import cached_property

from megastep.config import ParallelConfig
from megastep.models.architecture import Architecture
from megastep.models.family import Experts
from megastep.policy.logprobs import CHUNK_ROWS


@dataclass(frozen=True)
class Layer:
    """One layer on one rank. All results are bytes per token of the rank's micro-batch."""

    arch: Architecture
    parallel: ParallelConfig
    number: int
    itemsize: int  # bytes per element
    cuda: bool = True

    @cached_property
    def parts(self) -> dict[str, float]:
        """What backward needs, without recomputation."""
        arch = self.arch
        heads = self._query_width
        groups = self._key_width
        # Queries, keys and values are one tensor. On CPU attention copies the values, so only the
        # norms of queries and keys need it.
        keeps_qkv = self.cuda or arch.qk_norm
        # Rotated queries and keys; on CPU also values and output.
        attention = heads + groups if self.cuda else 2 * heads + 2 * groups
        elements = {
            "norm inputs": 2 * self._hidden_shard,
            "norm outputs": 2 * self._hidden_shard,
            "qkv": heads + 2 * groups if keeps_qkv else 0,
            "query norm": heads if arch.qk_norm else 0,
            "rope": 4 * arch.head_dim,  # cos and sin, for queries and for keys
            "attention": attention,
            "attention output": heads,
        }
        parts = {name: count * self.itemsize for name, count in elements.items()}
        parts["log-sum-exp"] = arch.heads / self.parallel.tensor * 4
        parts["mlp"] = self._moe() if self.is_moe else self._mlp()
        return parts

    def _mlp(self) -> float:
        """Gate, up and their product; on CPU also silu(gate) and a copy of up."""
        copies = 3 if self.cuda else 5
        return copies * self.arch.ffn_hidden / self.parallel.tensor * self.itemsize

    def _moe(self) -> float:
        """As in `_mlp`; on CPU experts also keep the product before the routing weights."""
        experts = self._experts
        copies = 3 if self.cuda else 6
        hidden = copies * experts.hidden / self.parallel.expert_tensor_size
        # Scores, probabilities and indices.
        router = (9 * experts.count + 12 * experts.top_k) / self.parallel.tensor
        return (self.arch.hidden + hidden) * self._expert_tokens * self.itemsize + router

    def kept(self, recompute: list[str]) -> float:
        """What the layer keeps until backward."""
        if "full" in recompute:
            # The layer's input; a token dispatcher also keeps its last input.
            return (2 if self.is_moe else 1) * self._hidden_shard * self.itemsize
        return sum(self.parts.values()) - sum(self._saved_by(module) for module in recompute)

    def recomputed(self, recompute: list[str]) -> float:
        """What the layer's backward computes again."""
        if "full" in recompute:
            return sum(self.parts.values())
        return max((self._saved_by(module) for module in recompute), default=0.0)

    def _saved_by(self, module: str) -> float:
        """What recomputing a module does not keep."""
        if module == "core_attn":
            kept_inputs = (self._query_width + self._key_width) * self.itemsize
            return self.parts["attention"] + self.parts["log-sum-exp"] - kept_inputs
        if module == "layernorm":
            return self.parts["norm outputs"]
        if module == "moe_act" and self.is_moe:
            hidden = self._experts.hidden / self.parallel.expert_tensor_size
            return hidden * self._expert_tokens * self.itemsize
        if module == ("moe" if self.is_moe else "mlp"):
            return self.parts["mlp"]
        return 0.0

    @property
    def gradients(self) -> float:
        """Gradients of activations at the peak of this layer's backward."""
        arch = self.arch
        if not self.is_moe:
            return (2 * arch.ffn_hidden + arch.hidden) / self.parallel.tensor * self.itemsize
        # On CUDA all experts are one grouped product, on CPU they run one after the other.
        inner: float = arch.hidden
        if self.cuda:
            inner = 3 * self._experts.hidden / self.parallel.expert_tensor_size
        return (2 * arch.hidden + inner) * self._expert_tokens * self.itemsize

    @property
    def is_moe(self) -> bool:
        return self.arch.is_moe_layer(self.number)

    @property
    def _experts(self) -> Experts:
        assert self.arch.experts is not None
        return self.arch.experts

    @property
    def _query_width(self) -> float:
        return self.arch.heads * self.arch.head_dim / self.parallel.tensor

    @property
    def _key_width(self) -> float:
        return self.arch.kv_heads * self.arch.head_dim / self.parallel.tensor

    @property
    def _hidden_shard(self) -> float:
        """Hidden size per token of the micro-batch: sequence parallelism shards the tokens."""
        return self.arch.hidden / self.parallel.tensor

    @property
    def _expert_tokens(self) -> float:
        """Tokens of the rank's experts per token of its micro-batch."""
        return self._experts.top_k / self.parallel.tensor * self.parallel.expert_tensor_size


def head_bytes(
    arch: Architecture, parallel: ParallelConfig, tokens: int, logits_chunk_rows: int, itemsize: int
) -> int:
    """Peak of the head: hidden states, and logits as policy/logprobs.py keeps and recomputes them.

    Every token is assumed to be trained.
    """
    vocab = arch.padded_vocab // parallel.tensor
    chunk = min(CHUNK_ROWS, logits_chunk_rows, tokens)
    kept_rows = min(logits_chunk_rows // chunk * chunk, tokens)
    # Norm and rows, with their gradients.
    hidden = (3 * tokens // parallel.tensor + 2 * tokens) * arch.hidden * itemsize
    # Of the weight: summed in fp32, then cast.
    gradient = vocab * arch.hidden * (4 if itemsize == 4 else 4 + itemsize)
    casts = 0 if itemsize == 4 else 2 * chunk * vocab * itemsize  # of inputs and outputs
    return hidden + kept_rows * vocab * 4 + max(chunk * vocab * 4, gradient + casts)
