"""python -m megastep.doctor.probe LIBRARY: import a library, print what it offers as JSON.

A process of its own: an import may raise, crash, hang, or print. The result is the last line of
stdout. The parts for CUDA and Transformer Engine have not run on a GPU yet; they are written
against torch 2.13 and Transformer Engine 2.11.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any


def torch_facts() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None,
        "gpus": [],
        "compiled_for": [],
        "peer_access": True,
        "error": None,
    }
    if torch.version.cuda is None:
        return found
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        torch.cuda.init()
    except Exception as error:
        found["error"] = str(error).splitlines()[0]
        return found
    found["compiled_for"] = torch.cuda.get_arch_list()
    found["gpus"] = [_gpu(torch, index) for index in range(torch.cuda.device_count())]
    found["peer_access"] = all(
        torch.cuda.can_device_access_peer(0, other) for other in range(1, len(found["gpus"]))
    )
    return found


def _gpu(torch, index: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": list(torch.cuda.get_device_capability(index)),
        "free_bytes": free,
        "total_bytes": total,
    }


def megatron_facts() -> dict[str, Any]:
    import megatron.core
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in fields(TransformerConfig)}
    return {
        "version": megatron.core.__version__,
        "routing_replay": "moe_enable_routing_replay" in names,
    }


def transformer_engine_facts() -> dict[str, Any]:
    import transformer_engine
    import transformer_engine.pytorch  # loads the compiled extension

    return {"version": str(transformer_engine.__version__), "attention": _attention_backend()}


def _attention_backend() -> str:
    """The kernel for packed causal sequences in bf16 with grouped queries; empty: none."""
    from transformer_engine.pytorch.attention.dot_product_attention.utils import (
        AttentionParams,
        get_attention_backend,
    )

    params = AttentionParams(
        qkv_layout="thd_thd_thd",
        batch_size=8,
        num_heads=32,
        num_gqa_groups=8,
        max_seqlen_q=4096,
        max_seqlen_kv=4096,
        head_dim_qk=128,
        head_dim_v=128,
        attn_mask_type="padding_causal",
        window_size=(-1, 0),
    )
    flash, flash_version, fused, fused_backend = get_attention_backend(params)[:4]
    if flash:
        return f"flash-attn {flash_version}"
    return f"cuDNN, {fused_backend}" if fused else ""


def vllm_facts() -> dict[str, Any]:
    import vllm
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # registers the backends of megastep/sync/receiver.py
    return {
        "version": vllm.__version__,
        "platform": current_platform.device_type,
        "routed_experts": "enable_return_routed_experts" in {f.name for f in fields(EngineArgs)},
        "sleep": bool(
            current_platform.is_sleep_mode_available()
            and current_platform.is_cumem_allocator_available()
        ),
        "backends": sorted(WeightTransferEngineFactory._registry),
    }


def ray_facts() -> dict[str, Any]:
    import ray

    return {"version": ray.__version__}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_facts,
    "megatron": megatron_facts,
    "transformer_engine": transformer_engine_facts,
    "vllm": vllm_facts,
    "ray": ray_facts,
}


def main(library: str) -> None:
    try:
        found = PROBES[library]()
    except Exception as error:
        # An ImportError of a compiled library may have many lines.
        text = " ".join(str(error).split())[:300]
        found = {"failed": f"{type(error).__name__}: {text}"}
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            found = {"missing": True}
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main(sys.argv[1])
