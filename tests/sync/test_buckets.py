"""Weight sync sends buckets of at most sync.bucket_mb, complete before they are read."""

import re

import torch

from megastep.distributed import parallel
from tests import cases


def test_buckets_have_the_size_of_the_config(ranks, models):
    folder, _ = models("qwen3_moe")
    (small,), (large,) = (
        ranks(1).run(cases.bucket_sizes, folder=folder, settings={"sync.bucket_mb": megabytes})
        for megabytes in (1, 64)
    )
    assert len(small) > 1 and max(small) <= 1 << 20
    assert large == [sum(small)]


def test_a_bucket_is_complete_before_it_is_read_and_read_before_it_is_freed(ranks, models):
    """vLLM's nccl sender reads on CUDA streams of its own, which wait for no other."""
    folder, _ = models("qwen3_moe")
    for order in ranks(2).run(cases.order_of_a_gather, folder=folder, layout=dict(tensor=2)):
        assert re.fullmatch("w(b+wr+wf+)+", order), order
        assert order.count("r") == order.count("f") and order.count("wr") > 3


def test_a_rank_waits_for_all_streams_of_its_gpu(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("cuda"))
    for has_cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        parallel.synchronize()
    assert waited == ["cuda"]
