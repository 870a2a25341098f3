"""Weight sync sends buckets of at most sync.bucket_mb."""

from tests import cases


def test_buckets_have_the_size_of_the_config(ranks, models):
    folder, _ = models("qwen3_moe")
    (small,), (large,) = (
        ranks(1).run(cases.bucket_sizes, folder=folder, settings={"sync.bucket_mb": megabytes})
        for megabytes in (1, 64)
    )
    assert len(small) > 1 and max(small) <= 1 << 20
    assert large == [sum(small)]
