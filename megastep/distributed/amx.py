"""AMX, the matrix unit of recent Intel CPUs, is off by default.

Some virtual machines report AMX and kill the process with SIGILL at the first bf16 product. Set
ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX to use it on others.
"""

import os

VARIABLE = "ONEDNN_MAX_CPU_ISA"  # oneDNN reads it once, when it is first used
WITHOUT_AMX = "AVX512_CORE_BF16"


def avoid_amx() -> None:
    """Call before the first bf16 product of the process; its children inherit the setting."""
    os.environ.setdefault(VARIABLE, WITHOUT_AMX)


def hide_amx_from_vllm() -> None:
    """vLLM's kernels query torch for AMX and ignore oneDNN's setting."""
    import torch

    if "AMX" not in os.environ.get(VARIABLE, "AMX"):
        torch.cpu._is_amx_tile_supported = lambda: False
