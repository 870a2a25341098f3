"""The shape of a model, read from a Hugging Face `config.json`.

No torch, no transformers: a config is checked against its model in milliseconds.

    family       attention                   feed-forward
    llama        optional biases everywhere  dense
    qwen2        bias on q, k, v             dense
    qwen3        norm on q and k             dense
    qwen3_moe    norm on q and k             MoE, some layers may be dense
    mixtral                                  MoE in every layer

Not supported, each with its own error: sliding windows shorter than the context, rope types that
depend on the input length, activations other than SiLU, shared experts.
"""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megastep.errors import ArchitectureError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
VOCAB_MULTIPLE = 128  # see padded_vocab

# Several times the largest models: larger values are typos and would take hours to lay out.
MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_VOCAB = 1 << 24
MAX_POSITIONS = 1 << 28
MAX_EXPERTS = 4096
MAX_TOTAL_EXPERTS = 1 << 16


@dataclass(frozen=True)
class Experts:
    count: int
    top_k: int
    hidden: int  # width of one expert
    normalize_top_k: bool  # the top-k routing weights sum to one
    layers: tuple[bool, ...]  # which layers are MoE; the others are dense


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
    tied: bool  # input embedding and output head share one tensor
    qkv_bias: bool
    all_bias: bool  # every linear layer has a bias (llama with attention_bias and mlp_bias)
    qk_norm: bool
    init_std: float
    experts: Experts | None
    hf: dict[str, Any] = field(repr=False, compare=False)  # config.json

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding in Megatron.

        The multiple does not depend on the parallel layout: a checkpoint has one shape under every
        tensor-parallel size that divides it.
        """
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def is_moe_layer(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


def read_architecture(folder: str | Path) -> Architecture:
    path = Path(folder) / "config.json"
    if not os.path.isdir(folder):
        shown = folder if len(str(folder)) <= 200 else f"{str(folder)[:197]}..."
        raise ArchitectureError(
            f"{shown}: no such folder; a Hugging Face model folder with a config.json is needed"
        )
    if not os.path.isfile(path):
        raise ArchitectureError(
            f"{path}: missing; a Hugging Face model folder holds its shape in config.json"
        )
    hf = _read_json(path)
    if not isinstance(hf, dict):
        raise ArchitectureError(f"{path}: holds a {type(hf).__name__}, an object is needed")
    return parse_architecture(hf, where=str(path))


def _read_json(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ArchitectureError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > MAX_CONFIG_BYTES:
        raise ArchitectureError(
            f"{path}: larger than {MAX_CONFIG_BYTES >> 20} MiB; a config.json is not"
        )
    try:
        return json.loads(content)
    except RecursionError:
        raise ArchitectureError(f"{path}: not readable as JSON (nested too deeply)") from None
    except ValueError as error:  # syntax, encoding, or a number with thousands of digits
        raise ArchitectureError(f"{path}: not readable as JSON ({error})") from None


def parse_architecture(hf: dict[str, Any], where: str = "config.json") -> Architecture:
    family = hf.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ArchitectureError(
            f"{where}: unknown architecture model_type={_short(family)}; supported: {known}"
        )
    entries = _Entries(hf, where, family)
    _check_supported(entries)
    biased = entries.flag("attention_bias") and entries.flag("mlp_bias")
    layers = entries.count("num_hidden_layers", MAX_LAYERS)
    hidden = entries.count("hidden_size", MAX_WIDTH)
    heads = entries.count("num_attention_heads", MAX_HEADS)
    return Architecture(
        family=family,
        layers=layers,
        hidden=hidden,
        ffn_hidden=entries.count("intermediate_size", MAX_WIDTH),
        heads=heads,
        kv_heads=_kv_heads(entries, heads),
        head_dim=_head_dim(entries, hidden, heads),
        vocab=entries.count("vocab_size", MAX_VOCAB),
        max_positions=entries.count("max_position_embeddings", MAX_POSITIONS),
        norm_eps=entries.number("rms_norm_eps", 1e-6, above=0.0, most=1.0),
        tied=entries.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or biased,
        all_bias=biased,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        init_std=entries.number("initializer_range", 0.02, above=0.0, most=10.0),
        experts=_experts(entries, layers),
        hf=hf,
    )


class _Entries:
    """Typed access to config.json; errors name the file, the key and the value."""

    def __init__(self, hf: dict[str, Any], where: str, family: str):
        self.hf = hf
        self.where = where
        self.family = family

    def invalid(self, key: str, reason: str) -> ArchitectureError:
        value: Any = self.hf
        for part in key.split("."):
            value = value.get(part)
        return ArchitectureError(f"{self.where}: {key} = {_short(value)}: {reason}")

    def has(self, key: str) -> bool:
        return self.hf.get(key) is not None

    def count(self, key: str, most: int) -> int:
        if not self.has(key):
            raise ArchitectureError(f"{self.where}: {key} is missing, {self.family} needs it")
        value = self.hf[key]
        if type(value) is not int or not 1 <= value <= most:
            raise self.invalid(key, f"must be a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float, above: float, most: float) -> float:
        value = self.hf[key] if self.has(key) else default
        if not _is_number(value) or not above < value <= most:
            raise self.invalid(key, f"must be a number above {above:g}, at most {most:g}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.hf[key] if self.has(key) else default
        if type(value) is not bool:
            raise self.invalid(key, "must be true or false")
        return value

    def section(self, key: str) -> dict[str, Any]:
        value = self.hf[key] if self.has(key) else {}
        if not isinstance(value, dict):
            raise self.invalid(key, "must be an object")
        return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a number beyond 64 bits"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kv_heads(entries: _Entries, heads: int) -> int:
    if not entries.has("num_key_value_heads"):
        return heads
    kv_heads = entries.count("num_key_value_heads", MAX_HEADS)
    if heads % kv_heads:
        raise entries.invalid(
            "num_key_value_heads", f"does not divide num_attention_heads = {heads}"
        )
    return kv_heads


def _head_dim(entries: _Entries, hidden: int, heads: int) -> int:
    if entries.has("head_dim"):
        key = "head_dim"
        head_dim = entries.count("head_dim", MAX_WIDTH)
    else:
        key = "hidden_size"
        if hidden % heads:
            raise entries.invalid(
                key, f"num_attention_heads = {heads} does not divide it; give head_dim"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise entries.invalid(
            key, f"makes heads of {head_dim}; rotary embeddings need an even size"
        )
    return head_dim


def _experts(entries: _Entries, layers: int) -> Experts | None:
    if entries.family not in ("mixtral", "qwen3_moe"):
        return None
    name = "num_local_experts"  # also Qwen3-MoE, as transformers 5 writes it
    if entries.family == "qwen3_moe" and entries.has("num_experts"):
        name = "num_experts"
    count = entries.count(name, MAX_EXPERTS)
    if count * layers > MAX_TOTAL_EXPERTS:
        raise entries.invalid(
            name, f"in {layers} layers: more than {MAX_TOTAL_EXPERTS} experts in all"
        )
    top_k = entries.count("num_experts_per_tok", MAX_EXPERTS)
    if top_k > count:
        raise entries.invalid("num_experts_per_tok", f"must not exceed {name} = {count}")
    if entries.family == "mixtral":
        hidden = entries.count("intermediate_size", MAX_WIDTH)
        return Experts(count, top_k, hidden, normalize_top_k=True, layers=(True,) * layers)
    return Experts(
        count=count,
        top_k=top_k,
        hidden=entries.count("moe_intermediate_size", MAX_WIDTH),
        normalize_top_k=entries.flag("norm_topk_prob"),
        layers=_expert_layers(entries, layers),
    )


def _expert_layers(entries: _Entries, layers: int) -> tuple[bool, ...]:
    dense = entries.hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise entries.invalid(
            "mlp_only_layers", f"must be a list of layers, each from 0 to {layers - 1}"
        )
    sparse_step = 1  # every so many layers one is MoE
    if entries.has("decoder_sparse_step"):
        sparse_step = entries.count("decoder_sparse_step", MAX_LAYERS)
    return tuple(i not in dense and (i + 1) % sparse_step == 0 for i in range(layers))


# ---------------------------------------------------------------- supported features


def rope_type(hf: dict[str, Any]) -> str:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` and `rope_theta`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def _check_supported(entries: _Entries) -> None:
    where = entries.where
    act = entries.hf.get("hidden_act", "silu")
    if act != "silu":
        raise ArchitectureError(f"{where}: hidden_act={_short(act)} is not supported; silu is")
    _check_rope(entries)
    attention_bias = entries.flag("attention_bias")
    mlp_bias = entries.flag("mlp_bias")
    if attention_bias != mlp_bias:
        raise ArchitectureError(
            f"{where}: attention_bias={attention_bias} with mlp_bias={mlp_bias} is not supported; "
            "Megatron-Core has biases in both or in neither"
        )
    _check_sliding_window(entries)


def _check_sliding_window(entries: _Entries) -> None:
    enabled = entries.flag("use_sliding_window", default=entries.family == "mixtral")
    if not enabled or not entries.has("sliding_window"):
        return
    window = entries.count("sliding_window", MAX_POSITIONS)
    if window < entries.count("max_position_embeddings", MAX_POSITIONS):
        raise ArchitectureError(
            f"{entries.where}: sliding_window={window} is shorter than max_position_embeddings, "
            "which is not supported"
        )


def _check_rope(entries: _Entries) -> None:
    entries.number("rope_theta", 1e4, above=0.0, most=1e15)
    parameters = entries.section("rope_parameters")
    scaling = entries.section("rope_scaling")
    if parameters:  # takes precedence
        _check_rope_section(entries, "rope_parameters", parameters)
    elif scaling:
        _check_rope_section(entries, "rope_scaling", scaling)


def _check_rope_section(entries: _Entries, name: str, rope: dict[str, Any]) -> None:
    kind = rope_type(entries.hf)
    if kind not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise ArchitectureError(
            f"{entries.where}: rope type {_short(kind)} is not supported; supported: {supported}"
        )
    for key, value in rope.items():
        if key not in ROPE_NUMBERS or value is None:
            continue
        if not _is_number(value) or not 0 < value <= 1e15:
            raise entries.invalid(f"{name}.{key}", "must be a number above 0")
    for key in ROPE_NEEDS[kind]:
        if rope.get(key) is None:
            raise ArchitectureError(
                f"{entries.where}: {name}.{key} is missing, rope type {kind} needs it"
            )
