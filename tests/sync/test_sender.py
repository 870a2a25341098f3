"""D3, D2: weight sync is complete under every parallel layout; no stale KV cache is served."""

import numpy as np
import pytest
import ray
import torch

from megastep.sync.checksum import add, checksum
from megastep.weights.mapping import hf_slices, param_mappings, to_megatron
from tests.engines import abandon_a_sync, corrupt_next_sync, export, send_incomplete, shake
from tests.models import some_tokens

LAYOUTS = {
    "tensor": dict(tensor=2),
    "pipeline": dict(pipeline=2),
    "expert": dict(expert=2),
    "virtual": dict(pipeline=2, virtual=2),
    "data": dict(),
}


def test_a_checksum_adds_up_over_slices_and_depends_on_positions():
    whole = torch.randn(6, 10)
    rows = [checksum(whole[:2], (0, 0), 10), checksum(whole[2:], (2, 0), 10)]
    columns = [checksum(whole[:, :3], (0, 0), 10), checksum(whole[:, 3:], (0, 3), 10)]
    assert add(*rows) == add(*columns) == checksum(whole)
    assert checksum(whole) != checksum(whole.flip(0))
    assert checksum(whole) != checksum(whole.bfloat16())
    changed = whole.clone()
    changed[3, 4] = torch.nextafter(changed[3, 4], torch.tensor(9.0))
    assert checksum(changed) != checksum(whole)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama_biases"])
def test_shards_are_slices_of_hf_tensors(models, name):
    """The slices of all shards, copied to their offsets, restore the tensors."""
    from megastep.models.architecture import read_architecture
    from megastep.weights.hf_files import HFReader

    folder, _ = models(name)
    arch = read_architecture(folder)
    read = HFReader(folder)
    for mapping in param_mappings(arch).values():
        wholes = {hf: torch.full(shape, torch.nan) for hf, shape in mapping.hf}
        for shard in range(2):
            local = to_megatron(mapping, read, arch, shard, num_shards=2)
            for part in hf_slices(mapping, local, arch, shard):
                part.copy_into(wholes[part.name])
        assert all(torch.equal(whole, read(hf)) for hf, whole in wholes.items()), mapping.megatron


def greedy_with_transformers(folder, prompts) -> tuple[list, object]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = model.generate(
        prompts, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tokens[:, prompts.shape[1] :].tolist(), model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_weight_sync_engines_equal_the_policy(rollouts, models, layout, tmp_path):
    """On both engines: tokens, logprobs and routing of transformers with the exported weights."""
    folder, _ = models("qwen3_moe")
    rollouts.lay(folder, LAYOUTS[layout])
    before = rollouts.cluster.sync()
    prompts = some_tokens(sequences=4, length=16)
    old = rollouts.ask(prompts)
    rollouts.on_ranks(shake, list(LAYOUTS).index(layout))
    assert rollouts.cluster.sync() == before + 1
    new = rollouts.ask(prompts)
    rollouts.on_ranks(export, tmp_path / "hf")
    expected, model = greedy_with_transformers(tmp_path / "hf", prompts)
    assert [g.ids.tolist() for g in new] == expected
    assert [g.versions.tolist() for g in new] == [[[before + 1, 12]]] * 4
    assert not any(np.allclose(a.logprobs, b.logprobs, atol=1e-3) for a, b in zip(old, new))
    for prompt, generation in zip(prompts, new):
        _check_against(model, prompt, generation)


def _check_against(model, prompt, generation) -> None:
    tokens = torch.cat([prompt, torch.from_numpy(generation.ids).long()])[None]
    with torch.no_grad():
        output = model(tokens, output_router_logits=True)
    logprobs = output.logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    wanted = logprobs.gather(1, torch.from_numpy(generation.ids).long()[:, None])[:, 0].numpy()
    np.testing.assert_allclose(generation.logprobs, wanted, atol=2e-4)
    routing = torch.stack([layer.topk(2).indices for layer in output.router_logits], dim=1)
    routing = routing[:-1]  # [P+R-1, L, K]
    assert np.array_equal(np.sort(generation.routing, -1), routing.sort(-1).values.numpy())


def test_no_stale_kv_cache_is_served(rollouts, models):
    """A prompt cached before a sync is generated after it as on an engine without the cache."""
    rollouts.lay(models("qwen3_moe")[0], dict(tensor=2))
    rollouts.cluster.sync()
    prompts = some_tokens(sequences=2, length=180, seed=7)  # more than a block of the cache
    cached = rollouts.ask(prompts, sessions=["a", "b"])
    again = rollouts.ask(prompts, sessions=["a", "b"])
    assert [g.ids.tolist() for g in cached] == [g.ids.tolist() for g in again]
    rollouts.on_ranks(shake, 5)
    rollouts.cluster.sync()
    new = rollouts.ask(prompts, sessions=["a", "b"])
    # Each prompt on the engine that has not cached it.
    elsewhere = rollouts.ask(prompts.flip(0), sessions=["a", "b"])[::-1]
    assert [g.ids.tolist() for g in new] == [g.ids.tolist() for g in elsewhere]
    for a, b in zip(new, elsewhere):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_after_an_abandoned_weight_update_the_next_is_complete(rollouts, models, tmp_path):
    """Layers that received some of their weights start again; experts are packed in place."""
    rollouts.lay(models("qwen3_moe")[0], dict(tensor=2))
    rollouts.cluster.sync()
    rollouts.on_ranks(shake, 8)
    rollouts.fleet.pause()
    rollouts.on_ranks(abandon_a_sync, rollouts.fleet.serving())
    rollouts.cluster.sync()
    rollouts.on_ranks(export, tmp_path / "hf")
    prompts = some_tokens()
    expected, _ = greedy_with_transformers(tmp_path / "hf", prompts)
    assert [g.ids.tolist() for g in rollouts.ask(prompts)] == expected


def test_an_update_without_one_expert_is_an_error_and_the_next_is_complete(
    rollouts, models, tmp_path
):
    """vLLM would take the layer for complete."""
    rollouts.lay(models("qwen3_moe")[0], dict(expert=2))
    rollouts.cluster.sync()
    rollouts.on_ranks(shake, 9)
    rollouts.fleet.pause()
    engines = rollouts.fleet.serving()
    errors, _ = rollouts.on_ranks(send_incomplete, engines, "layers.1.mlp.experts.5.")
    assert len(errors) == 2
    for error in errors:
        assert "weights are missing in 1 layers, such as model.layers.1.mlp" in error
    ray.get([engine.abandon_weight_update.remote() for engine in engines])
    rollouts.cluster.sync()
    rollouts.on_ranks(export, tmp_path / "hf")
    prompts = some_tokens()
    expected, _ = greedy_with_transformers(tmp_path / "hf", prompts)
    assert [g.ids.tolist() for g in rollouts.ask(prompts)] == expected


def test_verify_detects_a_wrong_value(rollouts, models):
    rollouts.lay(models("qwen3_moe")[0], dict(expert=2))
    rollouts.cluster.sync()
    rollouts.on_ranks(corrupt_next_sync)
    with pytest.raises(Exception, match=r"sync\.verify: checksum mismatch in tensor .*weight"):
        rollouts.cluster.sync()
    rollouts.on_ranks(lambda rank: rank.restore())
    rollouts.cluster.sync()
    assert len(rollouts.ask(some_tokens(2))) == 2


def test_checks_of_a_gpu_node_on_these_engines(rollouts, models, tmp_path):
    """tests/gpu compares engines with the policy in this way: within its limits, and beyond them
    if an engine has other weights."""
    from tests.gpu.checks import change_and_sync, engine_errors
    from tests.gpu.expected import EXPECTED

    rollouts.lay(models("qwen3_moe")[0], dict(tensor=2))
    change_and_sync(rollouts, seed=11)
    errors = engine_errors(rollouts, tmp_path / "synced")
    assert all(error <= EXPECTED[f"sync/{name}"].limit for name, error in errors.items()), errors
    rollouts.on_ranks(shake, 12)  # without a weight sync
    errors = engine_errors(rollouts, tmp_path / "changed")
    assert all(error > EXPECTED[f"sync/{name}"].limit for name, error in errors.items()), errors
