"""D1, D2: logprobs of the Transformer Engine policy equal those of transformers, for packed
sequences (Transformer Engine's kernel) and branching tries. Not run yet.

MoE models replay the rollout's routing: routers in bf16 choose other experts by themselves, and
would fail the comparison without a bug.
"""

import pytest

from tests.gpu.expected import ATTENTION_KINDS

DENSE = ("llama", "qwen2_tied", "qwen3_yarn")
MOE = ("qwen3_moe", "qwen3_moe_dense_layer")
MODELS = [*DENSE, *MOE]
LENGTHEN = 20  # paths of up to 1,000 tokens
LONG = {"max_position_embeddings": 2048}
# Pack layout, and policy.attention, which selects the kernel for tries that branch.
KERNELS = [("flat", "auto"), *(("trie", kind) for kind in ATTENTION_KINDS)]


def errors(
    pool, models, name: str, precision: str, pack_layout: str, kind: str
) -> dict[str, float]:
    from tests import cases
    from tests.gpu import checks
    from tests.policy.updates import make_groups

    folder, model = models(name, **LONG)
    replay = name in MOE
    groups = make_groups(replay, lengthen=LENGTHEN)
    results = pool.run(
        cases.train_a_little,
        folder=folder,
        layout={},
        groups=groups,
        settings=checks.policy_settings(precision, replay, kind),
        pack_layout=pack_layout,
        updates=0,
    )
    found = checks.merged(results, "before")
    return checks.logprob_errors(found, model, groups, precision, replay)


@pytest.mark.parametrize("pack_layout, kind", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_d2_logprobs_in_bf16_equal_transformers(name, pack_layout, kind, ranks, models, figure):
    found = errors(ranks(1), models, name, "bf16", pack_layout, kind)
    figure("logprobs/bf16/mean", found["mean"])
    figure("logprobs/bf16/max", found["max"])


@pytest.mark.parametrize("pack_layout, kind", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_d2_logprobs_in_fp32_equal_transformers(name, pack_layout, kind, ranks, models, figure):
    """Without TF32."""
    found = errors(ranks(1), models, name, "fp32", pack_layout, kind)
    figure("logprobs/fp32/max", found["max"])


@pytest.mark.parametrize("name", ["qwen3_yarn", "qwen3_moe"])
def test_d2_logprobs_in_fp32_with_tf32(name, tf32_ranks, models, figure):
    """With Transformer Engine's default: a user's fp32 has this error."""
    found = errors(tf32_ranks, models, name, "fp32", "trie", "auto")
    figure("logprobs/tf32/max", found["max"])
