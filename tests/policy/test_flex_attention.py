"""X1: FlexAttention over a trie: the tables of its BlockMask, and forward on CPU.

Torch has no backward of FlexAttention for CPU: backward is held by the tables of the query blocks
of each key block, which it reads on CUDA.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from megastep.policy import flex_attention
from megastep.samples.packing import join
from megastep.types import Trie
from tests.policy.tries import dense, random_trie, sequences

CPU = torch.device("cpu")
TABLES = ("kv", "full_kv", "q", "full_q")  # key blocks of a query block, and the reverse


def padded(trie: Trie, align_tokens: int) -> Trie:
    return join([trie], align_tokens, None).trie


def some_tries() -> list[Trie]:
    """Odd lengths of 1 to 8 blocks, padding, packed sequences."""
    tries = [random_trie(seed, tokens=1 + 53 * seed) for seed in range(20)]
    tries += [padded(random_trie(30, 200), 256), padded(random_trie(31, 500), 1024)]
    return [*tries, sequences(128), sequences(128, 256, 100)]


@pytest.mark.parametrize("trie", some_tries(), ids=len)
def test_x1_the_tables_are_those_of_create_block_mask(trie):
    end = torch.from_numpy(trie.end)

    def visible(batch, head, query, key):
        return (key <= query) & (query < end[key])

    ours = flex_attention.block_mask(trie, CPU)
    expected = create_block_mask(visible, None, None, len(trie), len(trie), device="cpu")
    assert ours.seq_lengths == expected.seq_lengths
    assert ours.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in TABLES:
        for suffix in ("num_blocks", "indices"):
            table = getattr(ours, f"{name}_{suffix}")
            torch.testing.assert_close(table, getattr(expected, f"{name}_{suffix}"), rtol=0, atol=0)
    queries, keys = np.divmod(np.arange(len(trie) ** 2), len(trie))
    index = [torch.from_numpy(i) for i in (queries, keys)]
    assert torch.equal(ours.mask_mod(None, None, *index), visible(None, None, *index))


def test_x1_forward_equals_a_dense_mask():
    """In a process of its own: where Megatron runs on CPU, torch's compiler is disabled."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(check_forward).result(timeout=300)


def check_forward() -> None:
    """The longest trie first, and none of a single block.

    Torch 2.13 replaces names in the C++ of FlexAttention as text (`ks1` also in `ks18`): it
    compiles only if no two sizes are equal in the first call, and not if one of them is 1.
    """
    torch._dynamo.config.disable = False  # a parent that runs Megatron sets TORCH_COMPILE_DISABLE
    torch.manual_seed(0)
    several_blocks = [trie for trie in some_tries() if len(trie) > flex_attention.BLOCK_TOKENS]
    for trie in sorted(several_blocks, key=len, reverse=True):
        query, key, value = (torch.randn(len(trie), heads, 32) for heads in (4, 2, 2))
        mask = flex_attention.block_mask(trie, CPU)
        with torch.no_grad():
            out = flex_attention.attend(query, key, value, mask, 0.2)
        expected = dense(query, key, value, trie, 0.2)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
