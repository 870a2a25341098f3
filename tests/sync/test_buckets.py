"""Weights go to the engines in buckets of sync.bucket_mb."""

from tests import cases


def test_buckets_are_as_large_as_the_config_says(ranks, models):
    folder, _ = models("qwen3_moe")
    (small,), (large,) = (
        ranks(1).run(cases.bucket_sizes, folder=folder, settings={"sync.bucket_mb": megabytes})
        for megabytes in (1, 64)
    )
    assert len(small) > 1 and max(small) <= 1 << 20
    assert large == [sum(small)]
