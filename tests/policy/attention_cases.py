"""Functions that test ranks run: attention inside the real model, and Triton in its interpreter."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megastep.policy import attention, flex_attention, model
from megastep.policy.visible_blocks import visible_blocks
from tests import cases
from tests.policy import updates
from tests.policy.tries import dense, random_trie

# ---------------------------------------------------------------- Megatron


class ScalarReads(TorchDispatchMode):
    """Counts reads of a tensor's value by Python: on CUDA each waits for the GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def rotary_calls(folder) -> tuple[list, int]:
    """The cu_seqlens of Megatron's calls, and scalar reads of its attention layers in forward."""
    from megatron.core.transformer import attention as megatron_attention

    worker = cases.make_worker(folder, {})
    reads = ScalarReads()
    cu_seqlens = []
    original_rotary = megatron_attention.apply_rotary_pos_emb
    original_forward = megatron_attention.SelfAttention.forward

    def rotary(*args, **kwargs):
        cu_seqlens.append(kwargs["cu_seqlens"])
        return original_rotary(*args, **kwargs)

    def forward(*args, **kwargs):
        with reads:
            return original_forward(*args, **kwargs)

    with (
        mock.patch.object(megatron_attention, "apply_rotary_pos_emb", rotary),
        mock.patch.object(megatron_attention.SelfAttention, "forward", forward),
    ):
        worker.logprobs_and_entropies(cases.next_token_batches(worker))
    return cu_seqlens, reads.count


class FakePacked(torch.nn.Module):
    """Stands in for TEDotProductAttention: causal attention of each sequence."""

    calls: list = []  # the packed_seq_params of each

    def __init__(self, config, softmax_scale=None, **unused):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, mask, mask_type, bias, packed_seq_params):
        self.calls.append(packed_seq_params)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = [[x.transpose(0, 1) for x in t.split(lengths)] for t in (query, key, value)]
        outs = [
            torch.nn.functional.scaled_dot_product_attention(
                *qkv, is_causal=True, scale=self.scale, enable_gqa=True
            )
            for qkv in zip(*parts)
        ]
        return torch.cat([out.transpose(0, 1) for out in outs]).flatten(1)


@contextmanager
def core_attention_of_cuda(used: set):
    """CudaTrieAttention in the CPU spec. Adds the name of each kernel that runs to `used`."""
    choose = attention.kernel_for

    def as_on_cuda(setting, device_type, branches):
        assert device_type == "cpu"
        kernel = choose(setting, "cuda", branches)
        used.add((kernel.name, branches))
        return kernel

    with ExitStack() as stack:
        replace = stack.enter_context
        # Not compiled: ranks on CPU have no torch.compile. test_flex_attention.py compiles it.
        eager = flex_attention.flex_attention
        replace(mock.patch.object(flex_attention, "_compiled", lambda: eager))
        flag = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
        replace(mock.patch(flag, True))
        replace(mock.patch.object(attention, "kernel_for", as_on_cuda))
        replace(mock.patch.object(model, "TrieAttention", attention.CudaTrieAttention))
        te = "megatron.core.extensions.transformer_engine.TEDotProductAttention"
        replace(mock.patch(te, FakePacked))
        FakePacked.calls.clear()
        yield


def _batches(pack_layout: str) -> list:
    by_rank = updates.micro_batches(updates.make_groups(replay=False), 1, 4096, pack_layout)
    return by_rank[0]


def logprobs_by_kernel(folder, setting: str | None, pack_layout: str) -> dict:
    """Logprobs of the worker and of its teacher; setting None: the CPU kernel."""
    used: set = set()
    settings = {
        "policy.attention": setting or "auto",
        "loss.type": "distill",
        "loss.teacher": str(folder),
    }
    batches = _batches(pack_layout)
    with ExitStack() as stack:
        if setting is not None:
            stack.enter_context(core_attention_of_cuda(used))
        worker = cases.make_worker(folder, {}, settings)
        logprobs = [logprob for logprob, _ in worker.logprobs_and_entropies(batches)]
        used_by_worker = set(used)
        used.clear()
        teacher = worker.teacher.logprobs(batches)
    return {
        "logprobs": np.concatenate(logprobs),
        "teacher": np.concatenate(teacher),
        "used": used_by_worker,
        "used by teacher": used,
        "starts": [packed.cu_seqlens_q.tolist() for packed in FakePacked.calls],
        "sequences": [[*b.trie.sequence_starts().tolist(), len(b.trie)] for b in batches],
    }


def update_with(folder, setting: str | None) -> dict[str, float]:
    """Loss and gradient norm of a supervised update; setting None: the CPU kernel."""
    used: set = set()
    with ExitStack() as stack:
        if setting is not None:
            stack.enter_context(core_attention_of_cuda(used))
        worker = cases.make_worker(folder, {}, {"policy.attention": setting or "auto"})
        metrics = worker.update(_batches("trie")).metrics
    assert {kernel for kernel, _ in used} == ({setting.upper()} if setting else set())
    return {name: metrics[f"train/{name}"] for name in ("loss", "grad_norm")}


# ---------------------------------------------------------------- Triton, in its interpreter
#
# These import triton_attention when they run: in the processes of other tests it would be compiled
# for a GPU.

CPU = torch.device("cpu")


@contextmanager
def bf16_products():
    """Triton 3.9's interpreter holds bf16 as bits, and its matrix product multiplies the bits."""
    from triton.language import bfloat16
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    product = InterpreterBuilder.create_dot

    def fp32_of(handle):
        if handle.dtype.scalar != bfloat16:
            return handle
        values = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return TensorHandle(values, tl.float32)

    def create_dot(self, a, b, *more):
        return product(self, fp32_of(a), fp32_of(b), *more)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield


def random_inputs(trie, heads: int, kv_heads: int, dim: int, dtype) -> list[Tensor]:
    """Query, key, value, and the gradient of the output."""
    shapes = [(len(trie), n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def triton_differences(shapes: list[dict], dtype: str) -> list[list[float]]:
    """Of each trie: the greatest differences of output, dq, dk and dv from a dense mask in fp64."""
    from megastep.policy import triton_attention

    torch.manual_seed(0)
    found = []
    for seed, shape in enumerate(shapes):
        trie = random_trie(seed, shape["tokens"], branch_rate=0.04)
        sizes = [shape[name] for name in ("heads", "kv_heads", "dim")]
        scale = sizes[-1] ** -0.5
        *inputs, grad = random_inputs(trie, *sizes, getattr(torch, dtype))
        blocks = triton_attention.trie_blocks(trie, CPU, shape["block_tokens"])
        with bf16_products():
            out = triton_attention.attend(*inputs, blocks, scale)
            ours = [out, *torch.autograd.grad(out, inputs, grad)]
        assert all(t.dtype == getattr(torch, dtype) for t in ours)
        exact = [t.detach().double().requires_grad_() for t in inputs]
        expected = dense(*exact, trie, scale)
        theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
        found.append([float((a.double() - b).abs().max()) for a, b in zip(ours, theirs)])
    return found


def triton_reads_invisible_blocks() -> tuple[np.ndarray, ...]:
    """[query blocks, key blocks] each: what NaN in a block reaches, and the visible pairs.

    Values of a key block reach outputs; gradients of a query block reach dk and dv.
    """
    from megastep.policy import triton_attention

    torch.manual_seed(0)
    num_blocks, block_tokens = 5, 16
    trie = random_trie(21, num_blocks * block_tokens, branch_rate=0.04)
    blocks = triton_attention.trie_blocks(trie, CPU, block_tokens)
    query, key, value, grad = random_inputs(trie, 1, 1, 16, torch.float32)
    in_forward, in_backward = np.zeros((2, num_blocks, num_blocks), bool)
    for block in range(num_blocks):
        rows = slice(block * block_tokens, (block + 1) * block_tokens)
        out = triton_attention.attend(query, key, _poisoned(value, rows), blocks, 0.25)
        in_forward[:, block] = _reached(out, num_blocks)
        out = triton_attention.attend(query, key, value, blocks, 0.25)
        dk, dv = torch.autograd.grad(out, (key, value), _poisoned(grad, rows))
        in_backward[block] = _reached(dk + dv, num_blocks)
    pairs = visible_blocks(trie, block_tokens)
    return in_forward, in_backward, pairs.partial | pairs.full


def _poisoned(tensor: Tensor, rows: slice) -> Tensor:
    out = tensor.detach().clone()
    out[rows] = torch.nan
    return out


def _reached(tensor: Tensor, num_blocks: int) -> np.ndarray:
    """Which blocks of tokens have NaN."""
    return tensor.detach().isnan().view(num_blocks, -1).any(-1).numpy()
