"""X1: attention over a trie equals a dense mask, forward and backward, for every block size."""

import random

import numpy as np
import pytest
import torch

from megastep.policy.cpu_attention import attend, blocks_of
from megastep.samples import lay_out
from megastep.types import Trie
from tests.policy.tries import dense, trie_of, worked_example
from tests.samples.rollouts import random_group, samples_of


def some_tries() -> list[Trie]:
    dice = random.Random(3)
    tries = []
    for _ in range(25):
        groups = [random_group(dice, id, "none", 0.0) for id in range(dice.randint(1, 3))]
        by_rank, _ = lay_out(samples_of(*groups), 1, 10_000, align_tokens=dice.choice([1, 4]))
        tries += [micro_batch.trie for micro_batch in by_rank[0]]
    return tries


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2), (4, 1)])
def test_equals_a_dense_mask(heads, kv_heads):
    torch.manual_seed(0)
    branched = 0
    for trie in some_tries():
        branched += trie.branches
        inputs = [
            torch.randn(len(trie), n, 32, requires_grad=True) for n in (heads, kv_heads, kv_heads)
        ]
        grad = torch.randn(len(trie), heads, 32)
        expected = dense(*inputs, trie, 0.2)
        expected_grads = torch.autograd.grad(expected, inputs, grad)
        for block_tokens, short_path_tokens in ((1, 0), (5, 3), (16, 0), (16, 8), (64, 512)):
            blocks = blocks_of(trie, heads // kv_heads, block_tokens, short_path_tokens)
            assert [b.start for b in blocks] == [0] + [b.stop for b in blocks[:-1]]
            assert blocks[-1].stop == len(trie)
            out = attend(*inputs, blocks, 0.2)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
            grads = torch.autograd.grad(out, inputs, grad)
            for ours, theirs in zip(grads, expected_grads, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    assert branched > 10


def test_blocks_of_the_worked_example():
    """The example in the docstring of blocks_of."""
    first, second = blocks_of(worked_example(), groups=1, block_tokens=4, short_path_tokens=0)
    assert (first.start, first.stop, first.shared, first.local) == (0, 4, None, slice(0, 4))
    assert (second.start, second.stop) == (4, 8)
    assert (second.shared, second.local) == (slice(0, 2), slice(4, 8))


def test_bf16_is_within_rounding_of_fp32():
    torch.manual_seed(0)
    trie = max(some_tries(), key=len)
    inputs = [torch.randn(len(trie), heads, 32) for heads in (8, 2, 2)]
    blocks = blocks_of(trie, 4, 16, 8)
    assert any(b.shared is not None for b in blocks)
    out = attend(*(t.bfloat16() for t in inputs), blocks, 0.2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), dense(*inputs, trie, 0.2), rtol=0, atol=0.03)


def long_trie(tokens: int) -> Trie:
    """A stem of half the tokens, with branches of 50 below it."""
    stem = tokens // 2
    branch = np.arange(tokens - stem) % 50
    position = np.concatenate([np.arange(stem), stem + branch]).astype(np.int32)
    starts = np.arange(stem, tokens) - branch
    end = np.concatenate([np.full(stem, tokens), np.minimum(starts + 50, tokens)]).astype(np.int32)
    return trie_of(position, end)


def test_memory_grows_with_the_tokens_not_with_their_square():
    """Everything that forward saves for backward, masks included."""

    def kept(tokens: int) -> int:
        trie = long_trie(tokens)
        blocks = blocks_of(trie, groups=4)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.nbytes) or t, lambda t: t
        ):
            inputs = [torch.randn(tokens, heads, 32, requires_grad=True) for heads in (8, 2, 2)]
            attend(*inputs, blocks, 0.2)
        masks = {
            b.mask.untyped_storage().data_ptr(): b.mask.untyped_storage().nbytes() for b in blocks
        }
        return sum(sizes) + sum(masks.values())

    small, large = kept(2000), kept(8000)
    assert large < 4.5 * small and large < 8000 * 8000 * 4 / 8
