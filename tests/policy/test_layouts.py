"""D1: under every parallel layout logprobs equal transformers', and steps a plain torch loop's."""

import functools

import numpy as np
import pytest
import torch

from tests import cases
from tests.models import MODELS, MOE_MODELS, some_tokens

DENSE_LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, dict(tensor=2)),
    "pp2": (2, dict(pipeline=2)),
    "pp2_uneven": (2, dict(pipeline=2, layers_per_stage=[1, 3])),
    "vpp2": (2, dict(pipeline=2, virtual=2)),
    "dp2": (2, {}),
    "tp2_pp2": (4, dict(tensor=2, pipeline=2)),
    "tp2_pp2_uneven": (4, dict(tensor=2, pipeline=2, layers_per_stage=[3, 1])),
}
MOE_LAYOUTS = {
    "ep2": (2, dict(expert=2)),
    "tp2_ep2_etp1": (2, dict(tensor=2, expert=2, expert_tensor=1)),
    "pp2_ep2": (4, dict(pipeline=2, expert=2)),
    "tp2_ep2_etp2": (4, dict(tensor=2, expert=2, expert_tensor=2)),
}
LAYOUTS = {**DENSE_LAYOUTS, **MOE_LAYOUTS}
CASES = [(m, lay) for m in MODELS for lay in (LAYOUTS if m in MOE_MODELS else DENSE_LAYOUTS)]
VARIANTS = ("llama_biases", "qwen3_moe_dense_layer")
COMBINED = ("vpp2", "tp2_pp2_uneven", "pp2_ep2", "tp2_ep2_etp2")


def has_step_case(model: str, layout: str) -> bool:
    """Steps take longer: combined layouts only for one dense and one MoE family."""
    if model in VARIANTS:
        return layout in ("tp2", "pp2")
    return model in ("llama", "qwen3_moe") or layout not in COMBINED


STEP_CASES = [(model, layout) for model, layout in CASES if has_step_case(model, layout)]


@pytest.mark.parametrize("name, layout", CASES)
def test_logprobs_equal_transformers_and_export_is_bit_exact(name, layout, ranks, models):
    """The entropy depends on every logit, also on those of a padded vocabulary."""
    folder, reference = models(name)
    world, settings = LAYOUTS[layout]
    results = ranks(world).run(cases.logprobs_and_round_trip, folder=folder, layout=settings)
    tokens = some_tokens()
    with torch.no_grad():
        expected = torch.log_softmax(reference(tokens).logits, -1)
    entropies = -(expected.exp() * expected).sum(-1)
    found = {key: values for part, _ in results for key, values in part.items()}
    assert len(found) == tokens[:, 1:].numel()
    for (sequence, at), values in found.items():
        target = [
            expected[sequence, at - 1, tokens[sequence, at]].item(),
            entropies[sequence, at - 1].item(),
        ]
        np.testing.assert_allclose(values, target, atol=2e-4)
    assert results[0][1] is True, "HF → Megatron → HF changed a tensor"


@pytest.fixture(scope="module")
def plain_steps(models):
    """Ten steps in a plain loop: transformers, AdamW, gradient clipping."""

    @functools.cache
    def get(name: str) -> list[tuple[float, float]]:
        return _plain_steps(models(name)[0])

    return get


def _plain_steps(folder) -> list[tuple[float, float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    tokens = some_tokens()
    result = []
    for _ in range(10):
        optimizer.zero_grad()
        logits = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result.append((loss.item(), norm.item()))
    return result


@pytest.mark.parametrize("name, layout", STEP_CASES)
def test_ten_steps_equal_a_plain_loop(name, layout, ranks, models, plain_steps):
    folder, _ = models(name)
    world, settings = LAYOUTS[layout]
    steps = ranks(world).run(cases.take_steps, folder=folder, layout=settings, steps=10)[0]
    ours = [(s["loss"], s["grad_norm"]) for s in steps]
    np.testing.assert_allclose(ours, plain_steps(name), rtol=1e-4)


@pytest.mark.parametrize(
    "name, layout", [("qwen3_moe", "ep2"), ("qwen3_moe", "tp2_pp2"), ("llama", "tp2")]
)
def test_bf16_trains(name, layout, ranks, models, plain_steps):
    folder, _ = models(name)
    world, settings = LAYOUTS[layout]
    steps = ranks(world).run(
        cases.take_steps, folder=folder, layout=settings, steps=10, precision="bf16"
    )[0]
    losses = [s["loss"] for s in steps]
    fp32 = [loss for loss, _ in plain_steps(name)]
    assert losses[-1] < losses[0] - 0.5 * (fp32[0] - fp32[-1])
    np.testing.assert_allclose(losses, fp32, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("layout", ["pp2", "tp2_pp2"])
def test_tied_embeddings_stay_tied(layout, ranks, models):
    """The copies on the first and the last pipeline stage change, and stay equal."""
    folder, reference = models("qwen2_tied")
    world, settings = LAYOUTS[layout]
    copies = ranks(world).run(cases.tied_copies, folder=folder, layout=settings, steps=3)
    half = world // 2
    for first, last in zip(copies[:half], copies[half:], strict=True):
        np.testing.assert_array_equal(first, last)
    start = reference.get_input_embeddings().weight.detach().numpy()[: len(copies[0])]
    assert np.abs(copies[0][: len(start)] - start).max() > 1e-3
