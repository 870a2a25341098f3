"""What one token leaves behind in each layer until backward has passed it, and what is there for a moment only.

Written down operation by operation, from what autograd keeps in the layers of policy/model.py. Two columns differ:

    CUDA    Transformer Engine's fused norms, activations and grouped experts
    CPU     Megatron's local layers, which keep the steps between; measured, see tests/plan/

The sum of a dense layer on CUDA is that of Korthikanti et al. (Reducing Activation Recomputation in Large Transformer
Models, 2022), which Megatron-LM's own estimate uses, without dropout and with what rotary embeddings and the norms of
queries and keys add. Routers are taken to spread tokens evenly over experts.
"""

from dataclasses import dataclass
from functools import cached_property

from megastep.config import ParallelConfig
from megastep.models.architecture import Architecture
from megastep.policy.logprobs import CHUNK_ROWS


@dataclass(frozen=True)
class Layer:
    """One layer on one rank. All results are bytes per token of the rank's micro-batch."""

    arch: Architecture
    split: ParallelConfig
    number: int
    size: int  # bytes of a number
    cuda: bool = True

    @cached_property
    def parts(self) -> dict[str, float]:
        """What backward needs, nothing being recomputed."""
        arch, tensor = self.arch, self.split.tensor
        heads, groups = arch.heads * arch.head_dim / tensor, arch.kv_heads * arch.head_dim / tensor
        numbers = {
            "norm inputs": 2 * self._shard,
            "norm outputs": 2 * self._shard,
            # In one tensor, of which the values are a part. On CPU attention has a copy of them, and only the norms of
            # queries and keys need it.
            "qkv": heads + 2 * groups if self.cuda or arch.qk_norm else 0,
            "query norm": heads if arch.qk_norm else 0,
            "rope": 4 * arch.head_dim,  # cos and sin, for queries and for keys
            "attention": heads + groups
            if self.cuda
            else 2 * heads + 2 * groups,  # rotated; CPU: values, output too
            "attention output": heads,
        }
        parts = {name: count * self.size for name, count in numbers.items()}
        return parts | {"log-sum-exp": arch.heads / tensor * 4, "mixer": self._mixer()}

    def _mixer(self) -> float:
        """Experts or a dense layer: gate and up, and their product. CPU: silu(gate), a copy of up, and in experts the
        product before it is weighed too."""
        if not self.is_moe:
            return (3 if self.cuda else 5) * self.arch.ffn_hidden / self.split.tensor * self.size
        experts = self.arch.experts
        hidden = (3 if self.cuda else 6) * experts.hidden / self.split.expert_tensor_size
        router = (
            9 * experts.count + 12 * experts.top_k
        ) / self.split.tensor  # scores, probabilities and choices
        return (self.arch.hidden + hidden) * self._expert_tokens * self.size + router

    def kept(self, recompute: list[str]) -> float:
        """What stays until backward."""
        if (
            "full" in recompute
        ):  # the layer's input; a dispatcher holds on to what it was given last
            return (2 if self.is_moe else 1) * self._shard * self.size
        return sum(self.parts.values()) - sum(self._dropped(what) for what in recompute)

    def again(self, recompute: list[str]) -> float:
        """What comes back while backward is in this layer."""
        if "full" in recompute:
            return sum(self.parts.values())
        return max((self._dropped(what) for what in recompute), default=0.0)

    def _dropped(self, what: str) -> float:
        if what == "core_attn":  # its inputs stay
            inputs = (
                (self.arch.heads + self.arch.kv_heads)
                * self.arch.head_dim
                / self.split.tensor
                * self.size
            )
            return self.parts["attention"] + self.parts["log-sum-exp"] - inputs
        if what == "layernorm":
            return self.parts["norm outputs"]
        if what == "moe_act" and self.is_moe:
            return (
                self.arch.experts.hidden
                / self.split.expert_tensor_size
                * self._expert_tokens
                * self.size
            )
        return self.parts["mixer"] if what == ("moe" if self.is_moe else "mlp") else 0.0

    @property
    def gradients(self) -> float:
        """Of activations, beside what was kept, at the worst moment of this layer's backward."""
        if not self.is_moe:
            return (2 * self.arch.ffn_hidden + self.arch.hidden) / self.split.tensor * self.size
        # On CUDA all experts are one product, on CPU one follows the other.
        inside = (
            3 * self.arch.experts.hidden / self.split.expert_tensor_size
            if self.cuda
            else self.arch.hidden
        )
        return (2 * self.arch.hidden + inside) * self._expert_tokens * self.size

    @property
    def is_moe(self) -> bool:
        return self.arch.is_moe_layer(self.number)

    @property
    def _shard(self) -> float:
        """Between the matrices each tensor-parallel rank has a stretch of the tokens."""
        return self.arch.hidden / self.split.tensor

    @property
    def _expert_tokens(self) -> float:
        """What the rank's experts see for each token of its micro-batch."""
        return self.arch.experts.top_k / self.split.tensor * self.split.expert_tensor_size


def head(arch: Architecture, split: ParallelConfig, tokens: int, head_rows: int, size: int) -> int:
    """Bytes at the head: hidden states, and logits as policy/logprobs.py keeps and computes them again. Every token is
    taken to be trained."""
    vocab = arch.padded_vocab // split.tensor
    chunk = min(CHUNK_ROWS, head_rows, tokens)
    kept_rows = min(head_rows // chunk * chunk, tokens)
    hidden = (
        (3 * tokens // split.tensor + 2 * tokens) * arch.hidden * size
    )  # norm, and rows; with their gradients
    gradient = vocab * arch.hidden * (4 if size == 4 else 4 + size)  # summed in fp32, then cast
    work = gradient + (0 if size == 4 else 2 * chunk * vocab * size)  # casts on the way in and out
    return hidden + kept_rows * vocab * 4 + max(chunk * vocab * 4, work)
