"""Expected: each kernel within 2e-2 of a dense mask in bf16, gradients within 5e-2. Not run."""

import pytest
import torch

from megastep.policy import flex_attention
from megastep.types import Trie
from tests.policy.tries import dense, random_trie

DEVICE = torch.device("cuda")


def attend(kernel: str, query, key, value, trie: Trie, scale: float):
    if kernel == "flex":
        mask = flex_attention.block_mask(trie, DEVICE)
        return flex_attention.attend(query, key, value, mask, scale)
    from megastep.policy import triton_attention

    blocks = triton_attention.trie_blocks(trie, DEVICE)
    return triton_attention.attend(query, key, value, blocks, scale)


@pytest.mark.parametrize("kernel", ["flex", "triton"])
@pytest.mark.parametrize("heads, kv_heads, dim", [(8, 8, 64), (8, 2, 64), (8, 2, 128)])
def test_a_kernel_equals_a_dense_mask(kernel, heads, kv_heads, dim):
    torch.manual_seed(0)
    scale = dim**-0.5
    for seed, tokens in enumerate((1, 100, 300, 1027, 3000)):
        trie = random_trie(seed, tokens)
        each = (heads, kv_heads, kv_heads)
        inputs = [torch.randn(tokens, n, dim).bfloat16().float().requires_grad_() for n in each]
        grad = torch.randn(tokens, heads, dim).bfloat16().float()
        expected = dense(*inputs, trie, scale)
        expected_grads = torch.autograd.grad(expected, inputs, grad)
        on_gpu = [t.detach().to(DEVICE, torch.bfloat16).requires_grad_() for t in inputs]
        out = attend(kernel, *on_gpu, trie, scale)
        torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)
        grads = torch.autograd.grad(out, on_gpu, grad.to(DEVICE, torch.bfloat16))
        for ours, theirs in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(ours.float().cpu(), theirs, rtol=5e-2, atol=5e-2)
