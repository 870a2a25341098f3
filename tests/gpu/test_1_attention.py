"""Expected: FlexAttention within 2e-2 of a dense mask in bf16, gradients within 5e-2. Not run."""

import pytest
import torch

from megastep.policy.attention import _compiled_flex, trie_params
from tests.policy.test_cpu_attention import dense, some_tries


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2)])
def test_flex_attention_equals_a_dense_mask(heads, kv_heads):
    torch.manual_seed(0)
    device = torch.device("cuda")
    for trie in [t for t in some_tries() if t.branches][:5]:
        each = (heads, kv_heads, kv_heads)
        inputs = [torch.randn(len(trie), n, 64).bfloat16().float().requires_grad_() for n in each]
        grad = torch.randn(len(trie), heads, 64).bfloat16().float()
        expected = dense(*inputs, trie, 0.125)
        expected_grads = torch.autograd.grad(expected, inputs, grad)
        on_gpu = [t.detach().to(device, torch.bfloat16).requires_grad_() for t in inputs]
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in on_gpu)
        mask = trie_params(trie, heads // kv_heads, device).block_mask
        out = _compiled_flex()(q, k, v, block_mask=mask, scale=0.125, enable_gqa=True)
        out = out.squeeze(0).transpose(0, 1)  # [T, heads, dim]
        torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)
        grads = torch.autograd.grad(out, on_gpu, grad.to(device, torch.bfloat16))
        for ours, theirs in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(ours.float().cpu(), theirs, rtol=5e-2, atol=5e-2)
