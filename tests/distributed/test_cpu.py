"""X2: the patches for Megatron-Core on gloo do nothing with CUDA, and change only Megatron."""

import subprocess
import sys

import torch

INERT = """
import torch
torch.cuda.is_available = lambda: True
from megastep.distributed import cpu
import megatron.core.optimizer.clip_grads as clip_grads
import megatron.core.tensor_parallel.random as random

def state():
    code = clip_grads.clip_grad_by_total_norm_fp32.__code__
    return {**vars(clip_grads)}, {**vars(random)}, torch.Tensor.cuda, code

before = state()
assert cpu.install() is False
assert state() == before and clip_grads.torch is torch
print("inert")
"""


def test_inert_with_cuda():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INERT], capture_output=True, text=True
    )
    assert run.stdout == "inert\n", run.stderr


COMPILER = """
import sys, torch
compile = torch.compile
from megastep.distributed import cpu
cpu.import_megatron()
import megastep.policy.worker
print("torch._inductor.compile_fx" in sys.modules, torch.compile is compile)
"""


def test_a_rank_does_not_import_the_compiler():
    """It takes two seconds of every rank's start."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILER], capture_output=True, text=True
    )
    assert run.stdout == "False True\n", run.stderr


def test_only_megatron_sees_another_torch():
    from megastep.distributed import cpu

    assert cpu.install() and cpu.install()  # the second call has no effect
    import megatron.core.optimizer.clip_grads as clip_grads

    assert clip_grads.torch is not torch
    assert clip_grads.torch.zeros(1, device="cuda").device.type == "cpu"
    assert clip_grads.torch.cuda.current_device() == torch.device("cpu")
    assert type(torch.cuda).__name__ == "module"
    try:
        torch.zeros(1, device="cuda")
    except (AssertionError, RuntimeError):
        pass
    else:
        raise AssertionError("torch itself was changed")
