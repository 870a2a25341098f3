"""Context parallelism without a GPU: which tokens and rows a rank has, against Megatron's own rotary slices."""

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from megastep.config import Config, validate
from megastep.policy.context import rows_here, spread, taken
from tests.policy.updates import make_groups, micro_batches


def batch(layout="flat"):
    return micro_batches(make_groups(replay=True), 1, 4096, layout)[0][0].trie


@pytest.mark.parametrize("size, tensor", [(2, 1), (4, 1), (2, 2)])
def test_every_token_and_row_is_on_one_rank(size, tensor):
    trie = batch()
    tokens, rows = [], []
    for rank in range(size):
        own = spread(trie, rank, size, tensor)
        assert len(own.take) * size == len(own.position) and len(own.take) % tensor == 0
        here, at = rows_here(trie.loss.src, own.take)
        assert np.array_equal(own.take[at], trie.loss.src[here])
        tokens += own.take[own.take >= 0].tolist()
        rows += here.tolist()
        assert (taken(trie.tokens, own.take, padding=0)[own.take < 0] == 0).all()
    assert sorted(tokens) == list(range(len(trie)))
    assert sorted(rows) == list(range(len(trie.loss)))


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_meet_their_rotary_frequencies(size):
    """Megatron picks a rank's frequencies, sequence by sequence; they must be those of the tokens it has."""
    trie = batch()
    for rank in range(size):
        own = spread(trie, rank, size, 1)
        frequencies = torch.from_numpy(own.position.astype(np.int64))
        picked = []
        for start, stop in zip(own.padded_starts[:-1], own.padded_starts[1:]):
            local = torch.empty((stop - start) // size)
            picked.append(
                _get_thd_freqs_on_this_cp_rank(rank, size, local, frequencies, int(start))
            )
        picked = torch.cat(picked).numpy()
        real = own.take >= 0
        assert np.array_equal(picked[real], trie.position[own.take[real]])


def test_a_branching_micro_batch_is_refused():
    trie = batch("trie")
    assert trie.branches
    with pytest.raises(ValueError, match="train.pack_layout"):
        spread(trie, 0, 2, 1)


def test_validation_refuses_it_for_tries_and_without_cuda():
    config = Config()
    config.model.path = "configs/models/qwen3-30b-a3b"
    config.policy.ranks = config.policy.parallel.context = 2
    problems = [p for p in validate(config) if p.startswith("policy.parallel.context")]
    assert len(problems) == (1 if torch.cuda.is_available() else 2)
    assert "train.pack_layout = merge or flat" in problems[0]
