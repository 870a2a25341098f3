"""D6: vLLM generates from the policy's export as transformers does from the original."""

import json
import subprocess
import sys

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


def test_exports_generate_the_same_greedy_tokens(ranks, models, tmp_path):
    from transformers import AutoModelForCausalLM

    expected = {}
    for name, (world, layout) in EXPORTS.items():
        folder, original = models(name)
        ranks(world).run(cases.export, folder=folder, layout=layout, destination=tmp_path / name)
        expected[name] = greedy_with_transformers(original)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert greedy_with_transformers(exported) == expected[name]
    assert greedy_with_vllm([tmp_path / name for name in EXPORTS]) == list(expected.values())


def greedy_with_vllm(folders) -> list[list[list[int]]]:
    """In a subprocess: vLLM needs one, and takes seconds to import."""
    arguments = [
        json.dumps([str(f) for f in folders]),
        json.dumps(some_tokens().tolist()),
        str(NEW_TOKENS),
    ]
    run = subprocess.run(
        [sys.executable, "-m", "tests.sync.vllm_greedy", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])
