"""D3: ipc and nccl with fake GPUs: the buffer of ipc, bytes and lost engines of nccl."""

import pytest

from tests.ranks import RankPool
from tests.sync import counted, fake_gpus

LARGE = dict(vocab_size=3000)  # embeddings of 1.5 MB
TWO_RANKS = {
    "tensor": dict(tensor=2),
    "pipeline": dict(pipeline=2),
    "expert": dict(expert=2),
    "virtual": dict(pipeline=2, virtual=2),
    "data": dict(),
    "tensor × expert": dict(tensor=2, expert=2),
}


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


@pytest.mark.parametrize(("layout", "engines"), [*((name, 3) for name in TWO_RANKS), ("tensor", 1)])
def test_d3_a_rank_sends_its_part_once_and_gathers_nothing(two_ranks, models, layout, engines):
    """To three engines as to one: they pass the weights on among themselves."""
    folder, _ = models("qwen3_moe", **LARGE)
    degrees = TWO_RANKS[layout]
    plan = counted.planned(folder, degrees, ranks=2)
    found = two_ranks.run(fake_gpus.nccl_bytes, folder=folder, layout=degrees, engines=engines)
    assert [rank["sent"] for rank in found] == plan.sent
    assert [rank["gathered"] for rank in found] == plan.gathered == [0, 0]
    assert all(rank["is_equal"] for rank in found)
    # For the optimizer before the first byte, for NCCL after the last.
    assert all(rank["waits"] == [0, rank["sent"]] for rank in found)
    received = found[0]["received"]
    assert sum(received) == plan.by_worker and len(received) == engines
    assert max(received) - min(received) < plan.by_worker / 10


def test_d3_ranks_of_ipc_gather_as_many_bytes_as_planned(two_ranks, models):
    """All weights but their own: vLLM loads whole tensors on each GPU."""
    folder, _ = models("qwen3_moe", **LARGE)
    for degrees in TWO_RANKS.values():
        plan = counted.planned(folder, degrees, ranks=2, colocate=True)
        found = two_ranks.run(fake_gpus.ipc_sync, folder=folder, layout=degrees, bucket_mb=1)
        assert [rank["gathered"]["received"] for rank in found] == plan.gathered
        assert [rank["gathered"]["sent"] for rank in found] == plan.sent


def test_d3_the_fake_of_nccl_has_vllms_signatures(two_ranks):
    assert two_ranks.run(fake_gpus.differing_signatures) == [[], []]


def test_d3_a_tensor_received_twice_is_an_error(two_ranks):
    """vLLM counts elements: a layer could be complete without some of its experts."""
    assert two_ranks.run(fake_gpus.load_twice) == ["model.norm.weight was received twice"] * 2


@pytest.mark.parametrize("trouble", ["dies", "hangs", "fails"])
def test_d3_an_engine_lost_in_a_sync_does_not_block_the_others(two_ranks, models, trouble):
    """They receive all weights in a group without it, and so they do in the next sync."""
    folder, _ = models("qwen3_moe", **LARGE)
    arguments = dict(folder=folder, layout=dict(tensor=2), lost=1, message=2, trouble=trouble)
    result, _ = two_ranks.run(fake_gpus.nccl_syncs, **arguments)
    assert result["dead"] == [False, True, False]
    assert result["complete"] == [True, False, True] and result["versions"] == [1, None, 1]
    assert result["groups"] == [5, 4, 4] and result["second"] == [2, None, 2]
    assert result["seconds"] < 50, result


def test_d3_an_engine_lost_while_the_group_forms_does_not_block_the_ranks(two_ranks, models):
    """The others cannot leave ncclCommInitRank: they are killed, as engines that hang."""
    folder, _ = models("qwen3_moe", **LARGE)
    arguments = dict(folder=folder, layout=dict(tensor=2), lost=2, message=0, trouble="dies")
    result, _ = two_ranks.run(fake_gpus.nccl_syncs, **arguments)
    assert result["dead"] == [True] * 3 and result["versions"] == [None] * 3
    assert result["seconds"] < 50, result


@pytest.mark.parametrize("message", [0, 2])
def test_d3_the_error_of_the_last_engine_ends_the_sync_on_all_ranks(two_ranks, models, message):
    """Message 0: while the group forms. No rank waits for another."""
    folder, _ = models("qwen3_moe", **LARGE)
    arguments = dict(folder=folder, layout=dict(tensor=2), message=message)
    errors = two_ranks.run(fake_gpus.nccl_error, **arguments)
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("no engine could load the weights: ")
        assert "no memory for a layer" in error
