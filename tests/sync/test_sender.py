"""D3, D2: the policy's weights reach the engines from every layout, whole, and nothing of the old ones is served."""

import numpy as np
import pytest
import torch

from megastep.sync.checksum import add, checksum
from megastep.weights.mapping import pieces_of, rows_of, to_megatron
from tests.engines import corrupt_next_sync, export, shake
from tests.models import some_tokens

LAYOUTS = {
    "tensor": dict(tensor=2),
    "pipeline": dict(pipeline=2),
    "expert": dict(expert=2),
    "virtual": dict(pipeline=2, virtual=2),
    "data": dict(),
}


def test_a_checksum_adds_up_over_pieces_and_sees_places():
    whole = torch.randn(6, 10)
    rows = [checksum(whole[:2], (0, 0), 10), checksum(whole[2:], (2, 0), 10)]
    columns = [checksum(whole[:, :3], (0, 0), 10), checksum(whole[:, 3:], (0, 3), 10)]
    assert add(*rows) == add(*columns) == checksum(whole)
    assert checksum(whole) != checksum(whole.flip(0)) and checksum(whole.bfloat16()) != checksum(
        whole
    )
    changed = whole.clone()
    changed[3, 4] = torch.nextafter(changed[3, 4], torch.tensor(9.0))
    assert checksum(changed) != checksum(whole)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama_biases"])
def test_cuts_are_pieces_of_hf_tensors(models, name):
    """Pieces of all cuts, put where they say, are the tensors again."""
    from megastep.models.architecture import read_architecture
    from megastep.weights.hf_files import HFReader

    folder, _ = models(name)
    arch, read = read_architecture(folder), HFReader(folder)
    for row in rows_of(arch).values():
        wholes = {hf: torch.full(shape, torch.nan) for hf, shape in row.hf}
        for cut in range(2):
            for piece in pieces_of(row, to_megatron(row, read, arch, cut, 2), arch, cut):
                piece.into(wholes[piece.name])
        assert all(torch.equal(whole, read(hf)) for hf, whole in wholes.items()), row.megatron


def greedy_with_transformers(folder, prompts) -> tuple[list, object]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = model.generate(
        prompts, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tokens[:, prompts.shape[1] :].tolist(), model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_push_the_engines_are_the_policy(rollouts, models, layout, tmp_path):
    """Greedy tokens, logprobs and experts are those of transformers on the exported weights, on both engines."""
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
    experts = torch.stack([layer.topk(2).indices for layer in output.router_logits], dim=1)[
        :-1
    ]  # [P+R-1, L, K]
    assert np.array_equal(np.sort(generation.routing, -1), experts.sort(-1).values.numpy())


def test_no_key_of_an_old_policy_is_served(rollouts, models):
    """A long prompt, cached under the old weights, answers under the new ones as if it had never been seen."""
    rollouts.lay(models("qwen3_moe")[0], dict(tensor=2))
    rollouts.cluster.sync()
    prompts = some_tokens(sequences=2, length=180, seed=7)  # more than a block of the cache
    cached = rollouts.ask(prompts, sessions=["a", "b"])
    again = rollouts.ask(prompts, sessions=["a", "b"])
    assert [g.ids.tolist() for g in cached] == [g.ids.tolist() for g in again]
    rollouts.on_ranks(shake, 5)
    rollouts.cluster.sync()
    new = rollouts.ask(prompts, sessions=["a", "b"])
    elsewhere = rollouts.ask(prompts.flip(0), sessions=["a", "b"])[
        ::-1
    ]  # each on the engine that has not seen it
    assert [g.ids.tolist() for g in new] == [g.ids.tolist() for g in elsewhere]
    for a, b in zip(new, elsewhere):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_verify_sees_a_wrong_number(rollouts, models):
    rollouts.lay(models("qwen3_moe")[0], dict(expert=2))
    rollouts.cluster.sync()
    rollouts.on_ranks(corrupt_next_sync)
    with pytest.raises(
        Exception,
        match="sync.verify: tensor .* arrived with another checksum than it was sent with",
    ):
        rollouts.cluster.sync()
    rollouts.on_ranks(lambda rank: rank.restore())
    rollouts.cluster.sync()
    assert len(rollouts.ask(some_tokens(2))) == 2
