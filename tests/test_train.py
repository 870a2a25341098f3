"""The main job through the command line: real processes, a run directory, a loss that falls."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megastep.report import read_metrics
from tests.policy.test_checkpoint import megastep_train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    command = megastep_train(folder, "first", "train.steps=40", "run.wandb=offline")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder / "first", done


def test_loss_falls_and_the_run_directory_is_complete(run):
    folder, done = run
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[0]["train/loss"] > 3.5 and rows[-1]["train/loss"] < 1.5
    assert {"config.yaml", "metrics.jsonl", "log.txt", "checkpoints", "wandb"} <= {p.name for p in folder.iterdir()}
    assert "40/40" in done.stdout and f"checkpoint in {folder}/checkpoints/step_40" in done.stdout


def test_d7_wandb_is_written_offline(run):
    (record,) = (run[0] / "wandb").glob("offline-run-*/run-*.wandb")
    assert record.stat().st_size > 1000


def test_output_is_quiet(run):
    """Warnings of the libraries are in log.txt, not on the screen."""
    assert run[1].stderr.strip() == ""
    assert "Transformer Engine and Apex are not installed" in (run[0] / "log.txt").read_text()


def test_a_finished_run_says_so(run):
    folder = run[0]
    again = subprocess.run(megastep_train(folder.parent, "first", "train.steps=40"), capture_output=True, text=True)
    assert again.returncode == 0 and "has its 40 steps already" in again.stdout


def test_checkpoint_of_the_run_exports_and_imports(run, tmp_path):
    """D6: the tool, both ways, on a checkpoint that two expert-parallel ranks wrote."""
    import torch

    from megastep.sync.hf_files import HFReader

    checkpoint = run[0] / "checkpoints" / "step_40"
    convert = [sys.executable, "tools/convert_ckpt.py"]
    first, again, back = tmp_path / "hf", tmp_path / "hf2", tmp_path / "ckpt"
    subprocess.run([*convert, "export", checkpoint, first, "--shard-size", "300KB"], check=True, capture_output=True)
    subprocess.run([*convert, "import", first, back], check=True, capture_output=True)
    subprocess.run([*convert, "export", back, again], check=True, capture_output=True)
    one, two = HFReader(first), HFReader(again)
    assert set(one.file_of) == set(two.file_of) and len(set(one.file_of.values())) > 1
    assert all(torch.equal(one(name), two(name)) for name in one.file_of)
    assert json.loads((first / "config.json").read_text())["model_type"] == "qwen3_moe"


@pytest.fixture
def endless(tmp_path):
    """A run in the middle of its steps, and its ranks."""
    command = megastep_train(tmp_path, "endless", "train.steps=100000")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process, _wait_for(lambda: _ranks_of(process.pid) if read_metrics(tmp_path / "endless") else None)
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_dies_ends_the_run(endless):
    process, ranks = endless
    os.kill(ranks[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "error: rank" in errors
    assert not any(os.path.exists(f"/proc/{rank}") for rank in ranks)


def test_interrupt_leaves_nothing_behind(endless):
    process, ranks = endless
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
    assert len(ranks) == 2 and not any(os.path.exists(f"/proc/{rank}") for rank in ranks)


def _ranks_of(driver: int) -> list[int]:
    children = Path(f"/proc/{driver}/task/{driver}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _wait_for(condition, timeout_s: float = 90):
    deadline = time.time() + timeout_s
    while time.time() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.2)
    raise TimeoutError
