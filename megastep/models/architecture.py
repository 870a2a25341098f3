"""The shape of a model, read from a Hugging Face `config.json`.

No torch, no transformers: a config is checked against its model in milliseconds. Each family has
its own file: llama.py, qwen2.py, qwen3.py, qwen3_moe.py, mixtral.py.

Not supported, each with its own error: sliding windows shorter than the context, rope types that
depend on the input length, activations other than SiLU, shared experts.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megastep.errors import ArchitectureError
from megastep.models.family import Experts, Family
from megastep.models.hf_config import (
    MAX_CONFIG_BYTES,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    HFConfig,
    is_number,
    short,
)
from megastep.models.llama import LLAMA
from megastep.models.mixtral import MIXTRAL
from megastep.models.qwen2 import QWEN2
from megastep.models.qwen3 import QWEN3
from megastep.models.qwen3_moe import QWEN3_MOE

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL)}
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
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ArchitectureError(
            f"{where}: unknown architecture model_type={short(model_type)}; supported: {known}"
        )
    family = FAMILIES[model_type]
    config = HFConfig(hf, where, model_type)
    _check_supported(config, family)
    biased = config.flag("attention_bias") and config.flag("mlp_bias")
    layers = config.count("num_hidden_layers", MAX_LAYERS)
    hidden = config.count("hidden_size", MAX_WIDTH)
    heads = config.count("num_attention_heads", MAX_HEADS)
    return Architecture(
        family=model_type,
        layers=layers,
        hidden=hidden,
        ffn_hidden=config.count("intermediate_size", MAX_WIDTH),
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=_head_dim(config, hidden, heads),
        vocab=config.count("vocab_size", MAX_VOCAB),
        max_positions=config.count("max_position_embeddings", MAX_POSITIONS),
        norm_eps=config.number("rms_norm_eps", 1e-6, above=0.0, most=1.0),
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or biased,
        all_bias=biased,
        qk_norm=family.qk_norm,
        init_std=config.number("initializer_range", 0.02, above=0.0, most=10.0),
        experts=family.experts(config, layers) if family.experts else None,
        hf=hf,
    )


def _kv_heads(config: HFConfig, heads: int) -> int:
    if not config.has("num_key_value_heads"):
        return heads
    kv_heads = config.count("num_key_value_heads", MAX_HEADS)
    if heads % kv_heads:
        raise config.invalid(
            "num_key_value_heads", f"does not divide num_attention_heads = {heads}"
        )
    return kv_heads


def _head_dim(config: HFConfig, hidden: int, heads: int) -> int:
    if config.has("head_dim"):
        key = "head_dim"
        head_dim = config.count("head_dim", MAX_WIDTH)
    else:
        key = "hidden_size"
        if hidden % heads:
            raise config.invalid(
                key, f"num_attention_heads = {heads} does not divide it; give head_dim"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise config.invalid(key, f"makes heads of {head_dim}; rotary embeddings need an even size")
    return head_dim


# ---------------------------------------------------------------- supported features


def rope_type(hf: dict[str, Any]) -> str:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` and `rope_theta`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def _check_supported(config: HFConfig, family: Family) -> None:
    where = config.where
    act = config.hf.get("hidden_act", "silu")
    if act != "silu":
        raise ArchitectureError(f"{where}: hidden_act={short(act)} is not supported; silu is")
    _check_rope(config)
    attention_bias = config.flag("attention_bias")
    mlp_bias = config.flag("mlp_bias")
    if attention_bias != mlp_bias:
        raise ArchitectureError(
            f"{where}: attention_bias={attention_bias} with mlp_bias={mlp_bias} is not supported; "
            "Megatron-Core has biases in both or in neither"
        )
    _check_sliding_window(config, family)


def _check_sliding_window(config: HFConfig, family: Family) -> None:
    enabled = config.flag("use_sliding_window", default=family.sliding_window)
    if not enabled or not config.has("sliding_window"):
        return
    window = config.count("sliding_window", MAX_POSITIONS)
    if window < config.count("max_position_embeddings", MAX_POSITIONS):
        raise ArchitectureError(
            f"{config.where}: sliding_window={window} is shorter than max_position_embeddings, "
            "which is not supported"
        )


def _check_rope(config: HFConfig) -> None:
    config.number("rope_theta", 1e4, above=0.0, most=1e15)
    parameters = config.section("rope_parameters")
    scaling = config.section("rope_scaling")
    if parameters:  # takes precedence
        _check_rope_section(config, "rope_parameters", parameters)
    elif scaling:
        _check_rope_section(config, "rope_scaling", scaling)


def _check_rope_section(config: HFConfig, name: str, rope: dict[str, Any]) -> None:
    kind = rope_type(config.hf)
    if kind not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise ArchitectureError(
            f"{config.where}: rope type {short(kind)} is not supported; supported: {supported}"
        )
    for key, value in rope.items():
        if key not in ROPE_NUMBERS or value is None:
            continue
        if not is_number(value) or not 0 < value <= 1e15:
            raise config.invalid(f"{name}.{key}", "must be a number above 0")
    for key in ROPE_NEEDS[kind]:
        if rope.get(key) is None:
            raise ArchitectureError(
                f"{config.where}: {name}.{key} is missing, rope type {kind} needs it"
            )
