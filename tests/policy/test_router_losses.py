"""A5: router losses equal their formulas over a plain transformers model; padding adds nothing."""

import numpy as np
import pytest
import torch

from megastep.config import ParallelConfig
from megastep.distributed import parallel
from megastep.policy import batch
from megastep.samples.packing import join
from tests import cases
from tests.models import MOE, some_tokens
from tests.policy.updates import hf_state

MODEL = "qwen3_moe"
BALANCE, Z = 0.3, 0.02
# ranks, parallel layout, alignment of the micro-batch of 60 tokens, padding micro-batches, settings
CASES = {
    "one rank": (1, {}, 1, 0, {}),
    "padding tokens": (1, {}, 64, 0, {}),
    "padding micro-batches": (1, {}, 1, 2, {}),
    "recomputed layers": (1, {}, 64, 1, {"policy.recompute": ["full"]}),
    "recomputed experts": (1, {}, 64, 1, {"policy.recompute": ["moe"]}),
    "tensor-parallel ranks with and without padding": (2, dict(tensor=2), 96, 0, {}),
    "a rank with padding micro-batches only": (2, {}, 64, 1, {}),
    "experts on a rank with padding micro-batches only": (2, dict(expert=2), 64, 1, {}),
    "pipeline": (2, dict(pipeline=2), 64, 1, {}),
}


@pytest.fixture(scope="module")
def plain_gradients(models) -> dict[str, np.ndarray]:
    """By HF name, from transformers and autograd."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models(MODEL)[0], dtype=torch.float32)
    before = hf_state(model)
    logits = []
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.register_forward_hook(
            lambda gate, inputs, _: logits.append(
                inputs[0].reshape(-1, gate.hidden_dim) @ gate.weight.T
            )
        )
    model(some_tokens()[:, :-1])
    assert len(logits) == 4
    sum(map(_router_loss, logits)).backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= p.grad
    return {name: before[name] - values for name, values in hf_state(model).items()}


def _router_loss(logits: torch.Tensor) -> torch.Tensor:
    tokens, experts = logits.shape
    probabilities = logits.softmax(-1)
    chosen = torch.bincount(
        logits.topk(MOE["num_experts_per_tok"]).indices.flatten(), minlength=experts
    )
    fraction = chosen / (tokens * MOE["num_experts_per_tok"])
    balance = experts * (fraction * probabilities.mean(0)).sum()
    return BALANCE * balance + Z * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("case", CASES)
def test_a5_padding_adds_nothing_to_router_losses(case, plain_gradients, ranks, models):
    world, layout, align, paddings, settings = CASES[case]
    gradients = ranks(world).run(
        cases.router_loss_gradients,
        folder=models(MODEL)[0],
        layout=layout,
        align=align,
        paddings=paddings,
        settings=settings,
    )[0]
    assert gradients.keys() == plain_gradients.keys()
    routers = [name for name in gradients if name.endswith("mlp.gate.weight")]
    assert len(routers) == 4 and all(np.abs(plain_gradients[name]).max() > 0.01 for name in routers)
    # Also of the parameters before the routers.
    for name, expected in plain_gradients.items():
        tolerance = 1e-4 * np.abs(expected).max() + 1e-6
        np.testing.assert_allclose(gradients[name], expected, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize("context", [0, 1])
def test_a5_padding_of_context_parallelism_is_marked(context):
    """Each sequence is padded to a multiple of 4 tokens and divided into 4 chunks, two per rank."""
    sequences = [join([], align, None).trie for align in (5, 3)]  # 5 and 3 tokens
    micro_batch = join(sequences, 1, None)
    micro_batch.real_tokens = 7  # the eighth is padding
    with parallel.imagined(ParallelConfig(context=2), context, 2):
        prepared = batch.prepare(micro_batch, 1, False, 16, 1.0, False, "auto")
    # By hand: 8 tokens of the first sequence, 4 of the second.
    expected = {0: [0, 0, 1, 1, 0, 1], 1: [0, 0, 0, 1, 0, 1]}
    assert prepared.padding[0].int().tolist() == expected[context]
