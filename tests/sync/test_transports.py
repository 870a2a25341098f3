"""D3: vLLM's ipc and nccl senders with fake GPUs: the buffer of ipc, engines lost under nccl."""

import pytest

from tests.ranks import RankPool
from tests.sync import fake_gpus

LARGE = dict(vocab_size=3000)  # embeddings of 1.5 MB


@pytest.fixture(scope="module")
def two_ranks():
    """Ranks of their own: they import vLLM."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(("bucket_mb", "largest"), [(1, 3000 * 128 * 4), (4, 4 << 20)])
def test_d3_the_buffer_of_ipc_holds_the_largest_tensor(two_ranks, models, bucket_mb, largest):
    """vLLM rejects a tensor that is larger than the buffer."""
    folder, _ = models("qwen3_moe", **LARGE)
    sent, _ = two_ranks.run(
        fake_gpus.ipc_sync, folder=folder, layout=dict(tensor=2), bucket_mb=bucket_mb
    )
    assert sent["buffer"] == largest and sent["largest"] == 3000 * 128 * 4
    assert sent["is_equal"] and sent["version"] == 7


@pytest.mark.parametrize("hangs", [False, True], ids=["dies", "hangs"])
def test_d3_an_engine_lost_in_a_broadcast_does_not_block_the_others(two_ranks, models, hangs):
    """They receive all weights in a group without it, and so they do in the next sync."""
    folder, _ = models("qwen3_moe", **LARGE)
    arguments = dict(folder=folder, layout=dict(tensor=2), lost=1, message=2, hangs=hangs)
    result, _ = two_ranks.run(fake_gpus.nccl_syncs, **arguments)
    assert result["dead"] == [False, True, False]
    assert result["complete"] == [True, False, True] and result["versions"] == [1, None, 1]
    assert result["groups"] == [4, 3, 3] and result["second"] == [2, None, 2]
    assert result["seconds"] < 50, result


def test_d3_an_engine_lost_while_the_group_forms_does_not_block_rank_0(two_ranks, models):
    """The others cannot leave ncclCommInitRank: they are killed, as engines that hang."""
    folder, _ = models("qwen3_moe", **LARGE)
    arguments = dict(folder=folder, layout=dict(tensor=2), lost=2, message=0, hangs=False)
    result, _ = two_ranks.run(fake_gpus.nccl_syncs, **arguments)
    assert result["dead"] == [True] * 3 and result["versions"] == [None] * 3
    assert result["seconds"] < 50, result
