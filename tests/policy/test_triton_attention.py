"""X1: the Triton kernel over tries, in Triton's interpreter and through its compiler, on CPU.

The interpreter needs a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

import numpy as np
import pytest
import torch

from tests.policy import attention_cases
from tests.ranks import RankPool

# 20 tries: several blocks, incomplete last ones, one token; heads of 8 to 128, also padded ones.
SHAPES = [
    dict(tokens=tokens, heads=heads, kv_heads=kv_heads, dim=dim, block_tokens=block_tokens)
    for block_tokens, heads, kv_heads, dim, lengths in (
        (16, 4, 2, 32, (1, 15, 16, 17, 40, 61)),
        (16, 2, 2, 16, (33, 48, 57, 64)),
        (16, 3, 1, 24, (20, 37)),
        (32, 2, 1, 8, (50, 90, 129)),
        (64, 2, 1, 64, (64, 130, 150)),
        (64, 2, 1, 128, (65, 140)),
    )
    for tokens in lengths
]


@pytest.fixture(scope="module")
def interpreter():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = RankPool(1)
    yield pool
    pool.close()


def test_x1_fp32_equals_a_dense_mask(interpreter):
    """Output, dq, dk and dv."""
    (differences,) = interpreter.run(
        attention_cases.triton_differences, shapes=SHAPES, dtype="float32"
    )
    assert np.shape(differences) == (20, 4)
    assert np.max(differences) < 1e-5, differences


def test_x1_bf16_is_within_rounding(interpreter):
    shapes = [shape for shape in SHAPES if shape["tokens"] in (61, 150)]
    (differences,) = interpreter.run(
        attention_cases.triton_differences, shapes=shapes, dtype="bfloat16"
    )
    assert 1e-4 < np.max(differences) < 0.08, differences  # gradients of up to 10


def test_x1_invisible_blocks_are_not_read(interpreter):
    ((in_forward, in_backward, visible),) = interpreter.run(
        attention_cases.triton_reads_invisible_blocks
    )
    assert np.tril(~visible).sum() >= 3
    assert np.array_equal(in_forward, visible)
    assert np.array_equal(in_backward, visible)


def test_x1_an_update_of_the_policy_equals_the_one_with_the_cpu_kernel(interpreter, models):
    """policy.attention=triton, through Megatron: forward and backward."""
    folder = models("qwen3_yarn")[0]
    (on_cpu,) = interpreter.run(attention_cases.update_with, folder=folder, setting=None)
    (ours,) = interpreter.run(attention_cases.update_with, folder=folder, setting="triton")
    assert ours == pytest.approx(on_cpu, rel=1e-5)


POINTERS = dict.fromkeys(("end", "starts", "full_stops", "listed"), "*i32") | dict.fromkeys(
    ("lse", "delta"), "*fp32"
)
KIB = 1024


@pytest.mark.parametrize(
    "capability, shared_kib, product, dim",
    [(80, 163, "mma.sync", 64), (90, 227, "wgmma", 128)],
    ids=["A100", "H100"],
)
def test_the_kernels_compile_for_a_gpu(capability, shared_kib, product, dim, monkeypatch, tmp_path):
    """Down to machine code; on tensor cores, within the GPU's shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megastep.policy import triton_attention

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    query = torch.empty(1, 32, dim, dtype=torch.bfloat16)
    constants = triton_attention._constants(query, query[:, :8], triton_attention.BLOCK_TOKENS)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    for kernel in (
        triton_attention._forward,
        triton_attention._backward_query,
        triton_attention._backward_key,
    ):
        types = {name: POINTERS.get(name, "*bf16") for name in kernel.arg_names}
        types |= {"tokens": "i32", "scale": "fp32"} | dict.fromkeys(constants, "constexpr")
        pointers = [i for i, kind in enumerate(types.values()) if kind.startswith("*")]
        aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
        compiled = triton.compile(
            ASTSource(kernel, types, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", capability, 32),
            options=options,
        )
        assert compiled.metadata.shared <= shared_kib * KIB
        assert product in compiled.asm["ptx"] and len(compiled.asm["cubin"]) > 0
