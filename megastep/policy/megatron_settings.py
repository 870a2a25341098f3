"""`policy.megatron` and the defaults by device: fields of Megatron's configs by their own names.

    TransformerConfig               layers, kernels, dispatchers, pipeline
    DistributedDataParallelConfig   gradient buffers and their communication
    OptimizerConfig                 Adam

A name that several of them have goes to each: overlap_param_gather, config_logger_dir. Names that
would break an invariant are rejected in config/megatron.py. The defaults on CUDA are those of
Megatron's own recipes; none has run on a GPU yet.
"""

import difflib
import types
from dataclasses import fields
from enum import Enum
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megastep.config import REJECTED_MEGATRON, Config, PolicyConfig
from megastep.errors import ConfigError
from megastep.models.architecture import Architecture
from megastep.text import shown

KINDS = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)

DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)  # deep_ep/buffer.py

# Formats of TE's recipes: E4M3 with scales per block, E5M2 for gradients with scales per tensor.
_FP8_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}


def given(kind: type, policy: PolicyConfig) -> dict[str, Any]:
    """The entries of policy.megatron that are fields of this config, in its types."""
    hints = get_type_hints(kind)
    names = [found.name for found in fields(kind) if found.name in policy.megatron]
    return {name: _converted(policy.megatron[name], hints[name]) for name in names}


# ---------------------------------------------------------------- defaults by device


def transformer_settings(arch: Architecture, policy: PolicyConfig, on_cuda: bool) -> dict[str, Any]:
    """Kernels and dispatcher: the defaults, and policy.megatron."""
    defaults: dict[str, Any] = dict(
        # TE's layers add weight gradients to the gradient buffer inside the matrix product.
        gradient_accumulation_fusion=on_cuda,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
        # Megatron checks the dispatcher for variable lengths even without experts.
        moe_token_dispatcher_type="alltoall",
    )
    own = given(TransformerConfig, policy)
    if arch.experts is None:  # the dense teacher of a MoE policy
        own = {name: value for name, value in own.items() if not name.startswith("moe_")}
    elif on_cuda:
        defaults |= dict(moe_permute_fusion=True, moe_router_dtype="fp32")
        if supports_deepep(policy) and find_spec("deep_ep") is not None:
            defaults |= dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    return defaults | _fp8(policy) | own


def ddp_settings(policy: PolicyConfig, on_cuda: bool) -> dict[str, Any]:
    """Overlap of communication with backward and forward passes, and policy.megatron."""
    defaults = dict(overlap_grad_reduce=on_cuda, overlap_param_gather=on_cuda)
    return defaults | given(DistributedDataParallelConfig, policy)


def optimizer_settings(policy: PolicyConfig, on_cuda: bool) -> dict[str, Any]:
    defaults = dict(overlap_param_gather=on_cuda, fp8_recipe=policy.fp8)
    return defaults | given(OptimizerConfig, policy)


def _fp8(policy: PolicyConfig) -> dict[str, Any]:
    """Matrix products of the layers in FP8; weights and the output layer stay in bf16."""
    if policy.fp8 is None:
        return {}
    return dict(fp8=_FP8_FORMATS[policy.fp8], fp8_recipe=policy.fp8)


def supports_deepep(policy: PolicyConfig) -> bool:
    """Whether DeepEP has a configuration for the ranks that share the experts."""
    ranks = policy.parallel.expert * policy.parallel.expert_tensor_size
    return policy.precision == "bf16" and ranks in DEEPEP_RANKS


# ---------------------------------------------------------------- checks


def check_settings(config: Config) -> None:
    """Names and types of policy.megatron against the installed Megatron; raises ConfigError."""
    problems = []
    for name, value in config.policy.megatron.items():
        problem = _problem(name, value)
        if problem is not None:
            problems.append(f"policy.megatron.{problem}")
    if problems:
        raise ConfigError(problems)


def _problem(name: str, value: Any) -> str | None:
    hints = [get_type_hints(kind)[name] for kind in KINDS if name in _names(kind)]
    if not hints:
        return f"{shown(name)}: unknown to megatron-core {version('megatron-core')}; {_hint(name)}"
    for hint in hints:
        if not _fits(value, hint):
            return f"{name} = {shown(repr(value))}: must be {_described(hint)}"
    return None


def _names(kind: type) -> list[str]:
    return [found.name for found in fields(kind)]


def _hint(name: str) -> str:
    accepted = [n for kind in KINDS for n in _names(kind) if n not in REJECTED_MEGATRON]
    near = difflib.get_close_matches(name, accepted, n=1, cutoff=0.6)
    return (
        f"did you mean {near[0]}?"
        if near
        else "its names are those of TransformerConfig, "
        + ("DistributedDataParallelConfig and OptimizerConfig")
    )


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(part, get_args(hint)[0]) for part in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in hint.__members__
    return isinstance(hint, type) and isinstance(value, hint)


def _converted(value: Any, hint: Any) -> Any:
    """An enumeration's member by its name; other values as they are."""
    is_enum = isinstance(hint, type) and issubclass(hint, Enum)
    return hint[value] if is_enum else value


def _described(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(hint.__members__)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return ", or ".join(_described(option) for option in get_args(hint))
    if hint is types.NoneType:
        return "null"
    return str(hint).replace("typing.", "") if get_origin(hint) else hint.__name__
