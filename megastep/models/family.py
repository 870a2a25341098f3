"""What a model family is made of: features of its architecture, and rules HF ↔ Megatron.

One file per family has both: llama.py, qwen2.py, qwen3.py, qwen3_moe.py, mixtral.py. To add one,
write such a file and register it in architecture.py. weights/mapping.py explains the shardings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megastep.models.hf_config import MAX_EXPERTS, MAX_TOTAL_EXPERTS, HFConfig


@dataclass(frozen=True)
class Experts:
    count: int
    top_k: int
    hidden: int  # width of one expert
    normalize_top_k: bool  # the top-k routing weights sum to one
    layers: tuple[bool, ...]  # which layers are MoE; the others are dense


@dataclass(frozen=True)
class Rule:
    """A Megatron parameter of every layer and expert, and its HF tensors.

    `hf` pairs a tensor's name with its shape: H hidden, Q query width, K key width, D head,
    F feed-forward width, X expert width, E experts, V vocabulary.
    """

    megatron: str
    sharding: Literal["replicated", "row_parallel", "vocab_parallel", "gate_up", "qkv"]
    hf: tuple[tuple[str, str], ...]
    when: str = ""  # a flag of Architecture that must be set; "!flag": must not be
    layers: str = "all"  # all | dense | moe


@dataclass(frozen=True)
class Family:
    model_type: str  # in config.json
    rules: tuple[Rule, ...]
    qkv_bias: bool = False  # always; other biases are flags of config.json
    qk_norm: bool = False
    sliding_window: bool = False  # default of use_sliding_window
    experts: Callable[[HFConfig, int], Experts] | None = None  # of config and number of layers


def count_experts(config: HFConfig, key: str, layers: int) -> tuple[int, int]:
    """Experts per layer, under `key`, and top k."""
    count = config.count(key, MAX_EXPERTS)
    if count * layers > MAX_TOTAL_EXPERTS:
        raise config.invalid(
            key, f"in {layers} layers: more than {MAX_TOTAL_EXPERTS} experts in all"
        )
    top_k = config.count("num_experts_per_tok", MAX_EXPERTS)
    if top_k > count:
        raise config.invalid("num_experts_per_tok", f"must not exceed {key} = {count}")
    return count, top_k


# ---------------------------------------------------------------- rules


_MEGATRON = "decoder.layers.{layer}."
_ATTN = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."

EMBEDDING_RULES = (
    Rule(
        "embedding.word_embeddings.weight",
        "vocab_parallel",
        (("model.embed_tokens.weight", "V H"),),
    ),
    Rule("decoder.final_layernorm.weight", "replicated", (("model.norm.weight", "H"),)),
    Rule("output_layer.weight", "vocab_parallel", (("lm_head.weight", "V H"),), when="!tied"),
    # The last pipeline stage keeps a second copy of a tied embedding.
    Rule(
        "output_layer.weight",
        "vocab_parallel",
        (("model.embed_tokens.weight", "V H"),),
        when="tied",
    ),
)
ATTENTION_RULES = (
    Rule(
        _MEGATRON + "input_layernorm.weight",
        "replicated",
        (("model.layers.{layer}.input_layernorm.weight", "H"),),
    ),
    Rule(
        _MEGATRON + "self_attention.linear_qkv.weight",
        "qkv",
        (
            (_ATTN + "q_proj.weight", "Q H"),
            (_ATTN + "k_proj.weight", "K H"),
            (_ATTN + "v_proj.weight", "K H"),
        ),
    ),
    Rule(
        _MEGATRON + "self_attention.linear_qkv.bias",
        "qkv",
        ((_ATTN + "q_proj.bias", "Q"), (_ATTN + "k_proj.bias", "K"), (_ATTN + "v_proj.bias", "K")),
        when="qkv_bias",
    ),
    Rule(
        _MEGATRON + "self_attention.q_layernorm.weight",
        "replicated",
        ((_ATTN + "q_norm.weight", "D"),),
        when="qk_norm",
    ),
    Rule(
        _MEGATRON + "self_attention.k_layernorm.weight",
        "replicated",
        ((_ATTN + "k_norm.weight", "D"),),
        when="qk_norm",
    ),
    Rule(
        _MEGATRON + "self_attention.linear_proj.weight",
        "row_parallel",
        ((_ATTN + "o_proj.weight", "H Q"),),
    ),
    Rule(
        _MEGATRON + "self_attention.linear_proj.bias",
        "replicated",
        ((_ATTN + "o_proj.bias", "H"),),
        when="all_bias",
    ),
    Rule(
        _MEGATRON + "pre_mlp_layernorm.weight",
        "replicated",
        (("model.layers.{layer}.post_attention_layernorm.weight", "H"),),
    ),
)
MLP_RULES = (
    Rule(
        _MEGATRON + "mlp.linear_fc1.weight",
        "gate_up",
        ((_MLP + "gate_proj.weight", "F H"), (_MLP + "up_proj.weight", "F H")),
        layers="dense",
    ),
    Rule(
        _MEGATRON + "mlp.linear_fc1.bias",
        "gate_up",
        ((_MLP + "gate_proj.bias", "F"), (_MLP + "up_proj.bias", "F")),
        layers="dense",
        when="all_bias",
    ),
    Rule(
        _MEGATRON + "mlp.linear_fc2.weight",
        "row_parallel",
        ((_MLP + "down_proj.weight", "H F"),),
        layers="dense",
    ),
    Rule(
        _MEGATRON + "mlp.linear_fc2.bias",
        "replicated",
        ((_MLP + "down_proj.bias", "H"),),
        layers="dense",
        when="all_bias",
    ),
)


def expert_rules(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Router and experts; `block`, `gate`, `up`, `down` are the family's HF names."""
    hf_block = f"model.layers.{{layer}}.{block}."
    hf_expert = hf_block + "experts.{expert}."
    megatron_expert = _MEGATRON + "mlp.experts.local_experts.{expert}."
    return (
        Rule(
            _MEGATRON + "mlp.router.weight",
            "replicated",
            ((hf_block + "gate.weight", "E H"),),
            layers="moe",
        ),
        Rule(
            megatron_expert + "linear_fc1.weight",
            "gate_up",
            ((f"{hf_expert}{gate}.weight", "X H"), (f"{hf_expert}{up}.weight", "X H")),
            layers="moe",
        ),
        Rule(
            megatron_expert + "linear_fc2.weight",
            "row_parallel",
            ((f"{hf_expert}{down}.weight", "H X"),),
            layers="moe",
        ),
    )


DENSE_RULES = EMBEDDING_RULES + ATTENTION_RULES + MLP_RULES
