"""The shape of a model, read from a Hugging Face `config.json`.

A leaf: no torch, no transformers, so that a config can be checked against its model in milliseconds.

    family       attention                   feed-forward
    llama        optional biases everywhere  dense
    qwen2        bias on q, k, v             dense
    qwen3        norm on q and k             dense
    qwen3_moe    norm on q and k             experts, some layers may be dense
    mixtral                                  experts in every layer

Deliberately left out, and refused by name: sliding windows that are shorter than the context, rope
types that change with the length of the input, activations other than SiLU, shared experts.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
VOCAB_MULTIPLE = 128  # see padded_vocab


class ArchitectureError(ValueError):
    """The model folder or its config.json cannot be used; the message says why, in one line."""


@dataclass(frozen=True)
class Experts:
    count: int
    top_k: int
    hidden: int  # width of one expert
    normalize_top_k: bool  # do the chosen experts' weights sum to one
    layers: tuple[bool, ...]  # which layers have experts; the others are dense


@dataclass(frozen=True)
class Architecture:
    family: str
    layers: int
    hidden: int
    ffn_hidden: int  # width of a dense feed-forward layer
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied: bool  # input embedding and output head are one tensor
    qkv_bias: bool
    all_bias: bool  # every linear layer has a bias (llama with attention_bias and mlp_bias)
    qk_norm: bool
    init_std: float
    experts: Experts | None
    hf: dict = field(repr=False, compare=False)  # config.json as it was read

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding in Megatron.

        The multiple does not depend on the layout, so a checkpoint has one shape under every
        tensor-parallel size that divides it.
        """
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def is_moe_layer(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


def read_architecture(folder: str | Path) -> Architecture:
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ArchitectureError(f"{folder}: no such folder; a Hugging Face model folder with a config.json is needed")
    if not path.is_file():
        raise ArchitectureError(f"{path}: missing; a Hugging Face model folder holds its shape in config.json")
    try:
        hf = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArchitectureError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(hf, dict):
        raise ArchitectureError(f"{path}: holds a {type(hf).__name__}, an object is needed")
    return parse_architecture(hf, where=str(path))


def parse_architecture(hf: dict, where: str = "config.json") -> Architecture:
    family = hf.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ArchitectureError(f"{where}: unknown architecture model_type={family!r}; supported: {known}")
    _refuse_what_is_not_supported(hf, where)

    def need(key: str):
        if hf.get(key) is None:
            raise ArchitectureError(f"{where}: {key} is missing, {family} needs it")
        return hf[key]

    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    biased = bool(hf.get("attention_bias", False)) and bool(hf.get("mlp_bias", False))
    return Architecture(
        family=family,
        layers=need("num_hidden_layers"),
        hidden=hidden,
        ffn_hidden=need("intermediate_size"),
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hidden // heads,
        vocab=need("vocab_size"),
        max_positions=need("max_position_embeddings"),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or biased,
        all_bias=biased,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        init_std=hf.get("initializer_range", 0.02),
        experts=_experts(family, hf, need),
        hf=hf,
    )


def _experts(family: str, hf: dict, need) -> Experts | None:
    layers = range(hf.get("num_hidden_layers", 0))
    if family == "mixtral":
        return Experts(
            count=need("num_local_experts"),
            top_k=need("num_experts_per_tok"),
            hidden=need("intermediate_size"),
            normalize_top_k=True,
            layers=tuple(True for _ in layers),
        )
    if family == "qwen3_moe":
        dense = set(hf.get("mlp_only_layers") or [])
        every = hf.get("decoder_sparse_step", 1)
        return Experts(
            # transformers 5 writes the second name
            count=hf.get("num_experts") or need("num_local_experts"),
            top_k=need("num_experts_per_tok"),
            hidden=need("moe_intermediate_size"),
            normalize_top_k=bool(hf.get("norm_topk_prob", False)),
            layers=tuple(i not in dense and (i + 1) % every == 0 for i in layers),
        )
    return None


def rope_type(hf: dict) -> str:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` beside `rope_theta`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def _refuse_what_is_not_supported(hf: dict, where: str) -> None:
    act = hf.get("hidden_act", "silu")
    if act != "silu":
        raise ArchitectureError(f"{where}: hidden_act={act!r} is not supported; silu is")
    rope = rope_type(hf)
    if rope not in ROPE_TYPES:
        raise ArchitectureError(f"{where}: rope type {rope!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    attention_bias, mlp_bias = bool(hf.get("attention_bias")), bool(hf.get("mlp_bias"))
    if attention_bias != mlp_bias:
        raise ArchitectureError(
            f"{where}: attention_bias={attention_bias} with mlp_bias={mlp_bias} is not supported; "
            "Megatron-Core has biases in both or in neither"
        )
    window = hf.get("sliding_window") if hf.get("use_sliding_window", hf["model_type"] == "mixtral") else None
    if window is not None and window < hf.get("max_position_embeddings", 0):
        raise ArchitectureError(
            f"{where}: sliding_window={window} is shorter than max_position_embeddings, which is not supported"
        )
