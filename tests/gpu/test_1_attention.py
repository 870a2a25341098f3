"""X1: attention over long tries equals a dense mask, forward and backward. Not run yet."""

import pytest

from tests.gpu.expected import ATTENTION_KINDS


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [300, 1023, 2560, 5000])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_x1_trie_attention_equals_a_dense_mask(
    kind, tokens, head_dim, heads, kv_heads, precision, figure
):
    import torch

    from tests.gpu.checks import attention_errors, branching_trie

    errors = attention_errors(
        kind,
        branching_trie(tokens, seed=head_dim + heads),
        heads,
        kv_heads,
        head_dim,
        precision,
        torch.device("cuda"),
    )
    for name, error in errors.items():
        figure(f"attention/{precision}/{name}", error)
