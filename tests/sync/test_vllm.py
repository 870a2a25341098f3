"""D6, X19: vLLM generates from the policy's export as transformers does from the original, also
after weights were reloaded."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import cases
from tests.models import some_tokens

NEW_TOKENS = 12


def greedy_with_transformers(model) -> list[list[int]]:
    prompts = some_tokens()
    tokens = model.generate(
        prompts, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tokens[:, prompts.shape[1] :].tolist()


EXPORTS = {
    "qwen3_moe": (2, dict(tensor=2, expert=2)),
    "qwen2_tied": (2, dict(pipeline=2)),
    "llama": (4, dict(tensor=2, pipeline=2)),
}
# Whole blocks of rows: these experts can be packed in place.
OVERRIDES = {"qwen3_moe": dict(moe_intermediate_size=64)}


@pytest.fixture(scope="module")
def exported(ranks, models, tmp_path_factory) -> SimpleNamespace:
    """Folders of exports by name, and what vLLM generates from each, in one process."""
    root = tmp_path_factory.mktemp("exports")
    folders = {name: root / name for name in EXPORTS}
    for name, (world, layout) in EXPORTS.items():
        original, _ = models(name, **OVERRIDES.get(name, {}))
        ranks(world).run(cases.export, folder=original, layout=layout, destination=folders[name])
    found = run_vllm(list(folders.values()))
    tokens = dict(zip(EXPORTS, found["tokens"], strict=True))
    return SimpleNamespace(folders=folders, tokens=tokens, reloads=found["reloads"])


def run_vllm(folders: list[Path]) -> dict:
    """In a subprocess: vLLM needs one, and takes seconds to import."""
    arguments = [[str(f) for f in folders], some_tokens().tolist(), NEW_TOKENS]
    run = subprocess.run(
        [sys.executable, "-m", "tests.sync.vllm_greedy", *map(json.dumps, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_exports_generate_the_same_greedy_tokens(exported, models):
    for name, folder in exported.folders.items():
        _, original = models(name, **OVERRIDES.get(name, {}))
        expected = greedy_with_transformers(original)
        assert greedy_with_transformers(read_back(folder)) == expected
        assert exported.tokens[name] == expected


def read_back(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("path", ["packed", "reloaded"])
def test_x19_skyrl_1680_vllm_42821_experts_are_packed_again_in_every_weight_sync(path, exported):
    """There, weights of a second load went unpacked into the memory of packed experts, and the
    engine generated noise. Here: loads of the same, of other and again of the first weights."""
    found = exported.reloads[path]
    first = exported.tokens["qwen3_moe"]
    assert found["same"] == found["back"] == first
    halved = read_back(exported.folders["qwen3_moe"])
    with torch.no_grad():
        changed = [p.mul_(0.5) for n, p in halved.named_parameters() if ".experts.down_proj" in n]
    assert len(changed) == 4  # layers
    assert found["halved"] == greedy_with_transformers(halved) != first


@pytest.mark.parametrize("path", ["packed", "reloaded"])
def test_x19_verl_7904_a_weight_sync_without_one_expert_is_an_error(path, exported):
    """There, experts that were not received stayed stale or uninitialized, without a message."""
    error = exported.reloads[path]["error"]
    assert error is not None and error.startswith("weights are missing in 1 layers")
    assert "layers.1.mlp.experts" in error
