"""The figures that tests/gpu reports, and their limits. The table of README.md has the same rows.

A figure is an error, or a fraction of memory: smaller is better. Limits are several times what the
same checks give on a CPU; none has been measured on a GPU yet.
"""

from typing import NamedTuple

# Values of policy.attention on CUDA; a new kernel is tested by adding it here.
ATTENTION_KINDS = ("flex", "triton")


class Figure(NamedTuple):
    limit: float
    meaning: str


EXPECTED = {
    "attention/fp32/output": Figure(1e-4, "attention over tries against a dense mask in fp32"),
    "attention/fp32/gradients": Figure(1e-4, "its gradients"),
    "attention/bf16/output": Figure(2e-2, "the same in bf16, on inputs rounded to bf16"),
    "attention/bf16/gradients": Figure(3e-2, "its gradients"),
    "logprobs/fp32/max": Figure(1e-4, "policy against `transformers`, routing replayed, no TF32"),
    "logprobs/tf32/max": Figure(5e-2, "the same with TF32, Transformer Engine's default in fp32"),
    "logprobs/bf16/mean": Figure(
        1.5, "the same in bf16, of the mean error of `transformers` in bf16"
    ),
    "logprobs/bf16/max": Figure(2.0, "the same of the largest error"),
    "layouts/fp32/logprobs": Figure(1e-4, "several ranks against one, no TF32: logprobs"),
    "layouts/fp32/grad_norm": Figure(1e-4, "gradient norm of an update, relative"),
    "layouts/fp32/after": Figure(1e-3, "logprobs after the update"),
    "layouts/bf16/logprobs": Figure(0.15, "several ranks against one in bf16: logprobs"),
    "layouts/bf16/grad_norm": Figure(3e-2, "gradient norm of an update, relative"),
    "layouts/bf16/after": Figure(0.5, "logprobs after the update"),
    "offload/half/after": Figure(
        0.3, "cpu_offload_fraction 0.5 against 0 in bf16: logprobs after 3 updates"
    ),
    "offload/half/memory": Figure(0.65, "its optimizer state on the GPU, of that with 0"),
    "offload/all/memory": Figure(0.0, "the same for cpu_offload_fraction 1"),
    "offload/policy/memory": Figure(1.1, "memory of an offloaded policy, of its weights"),
    "sleep/memory": Figure(0.35, "GPU memory that a sleeping engine keeps, of its share"),
    "plan/activations": Figure(0.15, "activations against `megastep plan`, relative"),
    "sync/logprobs": Figure(2e-2, "engine against `transformers` after a weight sync, fp32"),
    "sync/regret": Figure(2e-2, "logprob that a greedy token lacks to the best one"),
    "training/mismatch": Figure(
        1e-2, "chase in fp32 without TF32: engine against trainer, largest"
    ),
    "training/failures": Figure(0.1, "chase: held-out failures after its training"),
}
