"""Expected: weights, gradients and optimizer equal the plan to the byte, activations within 15%; an
optimizer in CPU memory takes nothing on the GPU. Not run yet.
"""

import pytest
import torch

from megastep.config import Config
from megastep.models.architecture import read_architecture
from megastep.plan.model_states import model_states
from megastep.plan.planning import stage_memory

TOKENS = 8192
BIG = dict(
    hidden_size=2048,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    vocab_size=32000,
    max_position_embeddings=16384,
)
EXPERTS = dict(moe_intermediate_size=768, num_experts=32, num_experts_per_tok=4)


@pytest.mark.parametrize("recompute", [[], ["full"], ["core_attn"]])
@pytest.mark.parametrize("model, shape", [("qwen3_yarn", BIG), ("qwen3_moe", BIG | EXPERTS)])
def test_x8_gpu_memory_equals_the_plan(model, shape, recompute, models):
    from megastep.distributed import parallel
    from tests import cases, ranks

    folder, _ = models(model, **shape)
    config = Config()
    config.model.path = str(folder)
    config.policy.precision = "bf16"
    config.policy.recompute = recompute
    config.train.micro_batch_tokens = TOKENS
    arch = read_architecture(folder)
    (states,) = model_states(config, arch)
    stage = stage_memory(config, arch, 0, states, micro_batches=1)
    ranks.current = (0, 1, "127.0.0.1:29534")
    settings = {"policy.precision": "bf16", "policy.recompute": recompute}
    try:
        worker, batches = cases.worker_and_batches(folder, {}, settings, TOKENS, micro_batches=1)
        worker.update(batches)
        held = cases.resident(worker)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        worker._run(batches, worker._loss)
        activations = torch.cuda.max_memory_allocated() - before
    finally:
        parallel.stop()
    assert held == dict(
        weights=states.weights, gradients=states.gradients, optimizer=states.optimizer
    )
    assert activations == pytest.approx(stage.activations, rel=0.15), stage


def test_x8_an_offloaded_optimizer_takes_no_gpu_memory(models):
    from megastep.distributed import parallel
    from tests import cases, ranks

    folder, _ = models("qwen3_yarn", **BIG)
    settings = {"policy.precision": "bf16", "optimizer.cpu_offload_fraction": 1.0}
    ranks.current = (0, 1, "127.0.0.1:29534")
    before = torch.cuda.memory_allocated()
    try:
        worker, batches = cases.worker_and_batches(folder, {}, settings, TOKENS, micro_batches=1)
        worker.update(batches)
        held = cases.resident(worker)
        # An fp32 copy of the weights would be as large as the gradients.
        other = torch.cuda.memory_allocated() - before - held["weights"] - held["gradients"]
    finally:
        parallel.stop()
    assert held["optimizer"] == 0 and other < held["gradients"] / 4
