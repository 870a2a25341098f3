"""The choice of the attention kernel, and what Megatron does around it."""

import functools

import numpy as np
import pytest

from megastep.policy.attention import Kernel, kernel_for
from tests.policy import attention_cases

MODEL = "qwen3_yarn"  # dense, grouped queries, a softmax scale of its own


@pytest.mark.parametrize(
    "setting, of_sequences, of_branches",
    [
        ("auto", Kernel.PACKED, Kernel.FLEX),
        ("flex", Kernel.FLEX, Kernel.FLEX),
        ("triton", Kernel.TRITON, Kernel.TRITON),
    ],
)
def test_policy_attention_chooses_the_kernel(setting, of_sequences, of_branches):
    assert kernel_for(setting, "cuda", branches=False) == of_sequences
    assert kernel_for(setting, "cuda", branches=True) == of_branches
    assert kernel_for(setting, "cpu", branches=True) == Kernel.CPU


@pytest.fixture(scope="module")
def logprobs(ranks, models):
    """`logprobs(setting, pack_layout)` of the policy and its teacher; setting None: on CPU."""

    @functools.cache
    def get(setting: str | None, pack_layout: str) -> dict:
        (found,) = ranks(1).run(
            attention_cases.logprobs_by_kernel,
            folder=models(MODEL)[0],
            setting=setting,
            pack_layout=pack_layout,
        )
        return found

    return get


@pytest.mark.parametrize(
    "setting, pack_layout, kernel",
    [("auto", "trie", "FLEX"), ("auto", "flat", "PACKED"), ("flex", "flat", "FLEX")],
)
def test_policy_attention_reaches_the_policy_and_its_teacher(
    setting, pack_layout, kernel, logprobs
):
    """The whole model with the core attention of CUDA, in place of the one for CPU."""
    found = logprobs(setting, pack_layout)
    assert found["used"] == found["used by teacher"] == {(kernel, pack_layout == "trie")}
    on_cpu = logprobs(None, pack_layout)
    for name in ("logprobs", "teacher"):
        np.testing.assert_allclose(found[name], on_cpu[name], rtol=0, atol=1e-5)


def test_the_packed_kernel_gets_the_sequences_in_every_layer(logprobs):
    found = logprobs("auto", "flat")
    assert all(len(starts) > 2 for starts in found["sequences"])
    assert {tuple(s) for s in found["starts"]} == {tuple(s) for s in found["sequences"]}
    layers, rest = divmod(len(found["starts"]), 2 * len(found["sequences"]))
    assert layers > 1 and rest == 0  # of the policy and of its teacher


def test_megatron_reads_no_sequence_length_from_the_device(ranks, models):
    """Its rotary embedding for packed sequences does, for each sequence in every layer."""
    ((cu_seqlens, scalar_reads),) = ranks(1).run(
        attention_cases.rotary_calls, folder=models(MODEL)[0]
    )
    assert len(cu_seqlens) > 0 and all(each is None for each in cu_seqlens)
    assert scalar_reads == 0
