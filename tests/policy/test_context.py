"""Context parallelism without a GPU: tokens and rows of each rank, and Megatron's rotary slices."""

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from megastep.config import Config, validate
from megastep.policy.context import own_rows, shard_sequences, take_tokens
from megastep.types import LossTable, Trie
from tests.policy.updates import make_groups, micro_batches


def make_trie(pack_layout="flat"):
    return micro_batches(make_groups(replay=True), 1, 4096, pack_layout)[0][0].trie


def test_the_worked_example():
    """The example in the docstring of ContextShard."""
    position = np.arange(7, dtype=np.int32)
    none = np.zeros(0, np.int32)
    trie = Trie(position, position, np.full(7, 7, np.int32), LossTable(*[none] * 8))
    assert shard_sequences(trie, 0, 2, 1).take.tolist() == [0, 1, 6, -1]
    assert shard_sequences(trie, 1, 2, 1).take.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("size, tensor", [(2, 1), (4, 1), (2, 2)])
def test_every_token_and_row_is_on_one_rank(size, tensor):
    trie = make_trie()
    tokens, rows = [], []
    for rank in range(size):
        shard = shard_sequences(trie, rank, size, tensor)
        assert len(shard.take) * size == len(shard.position) and len(shard.take) % tensor == 0
        shard_rows, src = own_rows(trie.loss.src, shard.take)
        assert np.array_equal(shard.take[src], trie.loss.src[shard_rows])
        tokens += shard.take[shard.take >= 0].tolist()
        rows += shard_rows.tolist()
        padding = shard.take < 0
        assert (take_tokens(trie.tokens, shard.take, padding=0)[padding] == 0).all()
    assert sorted(tokens) == list(range(len(trie)))
    assert sorted(rows) == list(range(len(trie.loss)))


@pytest.mark.parametrize("size", [2, 4])
def test_rotary_frequencies_are_those_of_the_tokens(size):
    """Megatron slices the frequencies of a rank sequence by sequence."""
    trie = make_trie()
    for rank in range(size):
        shard = shard_sequences(trie, rank, size, 1)
        frequencies = torch.from_numpy(shard.position.astype(np.int64))
        slices = []
        for start, stop in zip(shard.padded_starts[:-1], shard.padded_starts[1:]):
            local = torch.empty((stop - start) // size)
            slices.append(
                _get_thd_freqs_on_this_cp_rank(rank, size, local, frequencies, int(start))
            )
        sliced = torch.cat(slices).numpy()
        real = shard.take >= 0
        assert np.array_equal(sliced[real], trie.position[shard.take[real]])


def test_a_branching_micro_batch_is_rejected():
    trie = make_trie("trie")
    assert trie.branches
    with pytest.raises(ValueError, match="train.pack_layout"):
        shard_sequences(trie, 0, 2, 1)


def test_validation_rejects_context_parallelism_with_tries_and_without_cuda():
    config = Config()
    config.model.path = "configs/models/qwen3-30b-a3b"
    config.policy.ranks = config.policy.parallel.context = 2
    problems = [p for p in validate(config) if p.startswith("policy.parallel.context")]
    assert len(problems) == (1 if torch.cuda.is_available() else 2)
    assert "train.pack_layout = merge or flat" in problems[0]
