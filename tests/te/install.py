"""Transformer Engine's Python layers in a process without a GPU.

`install` makes the unpacked wheel importable, with extension.py in place of its compiled module,
and lets megastep build the CUDA layer spec. It changes what Megatron is for the whole process: call
it in a process of its own, before anything imports Megatron.

Not covered: kernels, the fused permutation among them, streams and devices, FP8,
TEDotProductAttention and FlexAttention, which need
a GPU: core attention is that of the CPU spec.
"""

import os
import sys
import types
from pathlib import Path

import torch

from megastep.distributed import cpu
from tests.te import extension


def install(wheel: Path) -> None:
    """wheel: the folder that it is unpacked in."""
    assert "megatron.core" not in sys.modules, "Megatron looks for Transformer Engine on import"
    sys.path.insert(0, str(wheel))
    _import_transformer_engine()
    _show_gpu_to_transformer_engine()
    _accept_cpu_tensors()
    cpu.import_megatron()
    _select_cuda_spec()


def _import_transformer_engine() -> None:
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # common/__init__.py: loads no CUDA library
    os.environ["NVTE_FRAMEWORK"] = "none"  # __init__.py: no warning without the compiled module
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # jit.py
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    sys.modules["transformer_engine_torch"] = extension
    # export.py imports it; it needs onnxscript.
    onnx = types.ModuleType("transformer_engine.pytorch.onnx_extensions")
    onnx.__getattr__ = extension.__getattr__  # type: ignore[method-assign]
    sys.modules[onnx.__name__] = onnx
    import transformer_engine.pytorch  # noqa: F401


class _CpuAsH100(cpu._CpuAsCuda):
    """Also answers the questions that Transformer Engine asks about a GPU."""

    def is_available(self):
        return True

    def is_current_stream_capturing(self):
        return False

    def get_device_capability(self, device=None):
        return 9, 0

    def get_device_properties(self, device=None):
        return types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)


def _show_gpu_to_transformer_engine() -> None:
    gpu_torch = cpu._cpu_torch()
    vars(gpu_torch)["cuda"] = _CpuAsH100()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = gpu_torch


def _accept_cpu_tensors() -> None:
    """module/base.py:1049: `assert inp.is_cuda`."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    function = TransformerEngineBaseModule.prepare_forward.__wrapped__
    names = function.__code__.co_names
    assert "is_cuda" in names
    renamed = tuple("is_cpu" if name == "is_cuda" else name for name in names)
    function.__code__ = function.__code__.replace(co_names=renamed)


def _select_cuda_spec() -> None:
    from megastep.policy import model

    assert model.has_cuda() is False
    model.has_cuda = lambda: True
    assert issubclass(model.CudaTrieAttention, torch.nn.Module)
    model.CudaTrieAttention = model.TrieAttention
    settings = model.transformer_settings

    def without_kernels(*arguments) -> dict:
        """TE's fused permutation is a Triton kernel."""
        return settings(*arguments) | {"moe_permute_fusion": False}

    model.transformer_settings = without_kernels
