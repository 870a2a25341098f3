"""Context parallelism without a GPU: tokens, positions, sequences and rows of each rank."""

import numpy as np
import pytest
import torch

from megastep.config import Config, ParallelConfig, validate
from megastep.distributed import parallel
from megastep.policy import batch
from megastep.policy.context import own_rows, shard_sequences, take_tokens
from tests.policy.tries import sequences
from tests.policy.updates import make_groups, micro_batches


def make_trie(pack_layout="flat"):
    return micro_batches(make_groups(replay=True), 1, 4096, pack_layout)[0][0].trie


def test_the_worked_example():
    """The example in the docstring of ContextShard."""
    first, second = (shard_sequences(sequences(7), rank, 2, 1) for rank in range(2))
    assert first.take.tolist() == [0, 1, 6, -1]
    assert first.position.tolist() == [0, 1, 6, 7]
    assert second.take.tolist() == second.position.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("size, tensor", [(2, 1), (4, 1), (2, 2)])
def test_every_token_and_row_is_on_one_rank(size, tensor):
    trie = make_trie()
    tokens, rows = [], []
    for rank in range(size):
        shard = shard_sequences(trie, rank, size, tensor)
        assert len(shard.take) * size == shard.padded_starts[-1] and len(shard.take) % tensor == 0
        shard_rows, src = own_rows(trie.loss.src, shard.take)
        assert np.array_equal(shard.take[src], trie.loss.src[shard_rows])
        tokens += shard.take[shard.take >= 0].tolist()
        rows += shard_rows.tolist()
        padding = shard.take < 0
        assert (take_tokens(trie.tokens, shard.take, padding=0)[padding] == 0).all()
    assert sorted(tokens) == list(range(len(trie)))
    assert sorted(rows) == list(range(len(trie.loss)))


@pytest.mark.parametrize("size", [2, 4])
def test_positions_are_those_of_the_tokens(size):
    trie = make_trie()
    for rank in range(size):
        shard = shard_sequences(trie, rank, size, 1)
        assert len(shard.position) == len(shard.take)
        real = shard.take >= 0
        assert np.array_equal(shard.position[real], trie.position[shard.take[real]])


def test_transformer_engine_gets_the_sequences_and_megatron_the_positions():
    micro_batch = micro_batches(make_groups(replay=True), 1, 4096, "flat")[0][0]
    with parallel.imagined(ParallelConfig(context=2), 1, 2):
        prepared = batch.prepare(micro_batch, 1, False, 16, 1.0, False, "auto")
    shard = shard_sequences(micro_batch.trie, 1, 2, 1)
    assert prepared.tokens.shape == (1, len(shard.take))
    assert prepared.position.tolist() == shard.position.tolist()
    assert prepared.attention.qkv_format == "sbhd" and prepared.attention.cu_seqlens_q is None
    packed = prepared.attention.sequences
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == shard.starts.tolist()
    assert packed.cu_seqlens_q_padded.tolist() == shard.padded_starts.tolist()
    assert packed.max_seqlen_q == np.diff(shard.padded_starts).max()


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
