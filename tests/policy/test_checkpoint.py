"""Checkpoints: another layout, the same numbers; a kill leaves the previous one; what is not whole is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megastep.policy.manifest import CheckpointError, latest, read_manifest
from megastep.report import read_metrics
from tests import cases

TP2, PP2, EP2 = dict(tensor=2), dict(pipeline=2), dict(expert=2)


def numbers(steps: list[dict]) -> list[tuple]:
    return [(s["loss"], s["grad_norm"], s["lr"]) for s in steps]


@pytest.fixture(scope="module")
def saved(ranks, models, tmp_path_factory):
    """A checkpoint written under TP2, and the steps that followed it there."""
    folder, _ = models("qwen3_moe")
    root = tmp_path_factory.mktemp("saved")
    steps = ranks(2).run(cases.save_then_go_on, folder=folder, layout=TP2, root=root, before=3, after=3)[0]
    return folder, root / "step_3", steps


@pytest.mark.parametrize("world, layout", [(2, PP2), (2, EP2), (1, {}), (2, TP2), (4, dict(tensor=2, pipeline=2))])
def test_loads_under_another_layout(world, layout, saved, ranks):
    """Three steps, not one: a wrong optimizer state shows from the second on."""
    folder, checkpoint, expected = saved
    steps = ranks(world).run(cases.load_and_go_on, folder=folder, layout=layout, checkpoint=checkpoint, steps=3)[0]
    np.testing.assert_allclose(numbers(steps), numbers(expected), rtol=1e-5)


def test_same_layout_continues_bit_for_bit(saved, ranks):
    folder, checkpoint, expected = saved
    steps = ranks(2).run(cases.load_and_go_on, folder=folder, layout=TP2, checkpoint=checkpoint, steps=3)[0]
    assert numbers(steps) == numbers(expected)


def test_bf16_keeps_its_master_weights(ranks, models, tmp_path):
    folder, _ = models("qwen3_moe")
    arguments = dict(folder=folder, precision="bf16")
    expected = ranks(2).run(cases.save_then_go_on, layout=EP2, root=tmp_path, before=3, after=3, **arguments)[0]
    steps = ranks(2).run(cases.load_and_go_on, layout=EP2, checkpoint=tmp_path / "step_3", steps=3, **arguments)[0]
    assert numbers(steps) == numbers(expected)


def test_asynchronous_save_holds_the_step_it_was_asked_at(ranks, models, tmp_path):
    """Training goes on while the files are written; they must not see its updates."""
    folder, _ = models("qwen3_moe")
    expected = ranks(2).run(
        cases.save_then_go_on, folder=folder, layout=EP2, root=tmp_path, before=3, after=3, asynchronous=True
    )[0]
    steps = ranks(2).run(cases.load_and_go_on, folder=folder, layout=EP2, checkpoint=tmp_path / "step_3", steps=3)[0]
    assert numbers(steps) == numbers(expected)


def test_random_state_is_restored(ranks, models, tmp_path):
    folder, _ = models("qwen2_tied")
    for expected, found in ranks(2).run(cases.random_numbers_after_load, folder=folder, layout=PP2, root=tmp_path):
        assert expected == found


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved[1], tmp_path / "step_3")


def test_truncated_checkpoint_is_refused(copy, saved, ranks):
    victim = sorted(copy.glob("*.distcp"))[0]
    os.truncate(victim, victim.stat().st_size // 2)
    (error,) = ranks(1).run(cases.loading_error, folder=saved[0], layout={}, checkpoint=copy)
    assert f"{victim}: truncated" in error


def test_checkpoint_with_a_missing_file_is_refused(copy):
    victim = sorted(copy.glob("*.distcp"))[0]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim}: missing"):
        read_manifest(copy)


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "model.pt").write_text("not ours")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no megastep.json"):
        read_manifest(tmp_path)


def test_newer_format_is_refused(copy):
    manifest = json.loads((copy / "megastep.json").read_text())
    (copy / "megastep.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99 is newer"):
        read_manifest(copy)


def test_checkpoint_of_another_model_is_refused(saved, ranks, models):
    other, _ = models("qwen3_moe", num_experts=16)
    (error,) = ranks(1).run(cases.loading_error, folder=other, layout={}, checkpoint=saved[1])
    assert "is of another model: num_local_experts is 8 there, 16 here" in error


def megastep_train(run_dir, name: str, *overrides: str) -> list[str]:
    return [
        sys.executable, "-m", "megastep", "train", "configs/local.yaml", f"run.dir={run_dir}", f"run.name={name}",
        "train.batch_sequences=8", "train.micro_batch_sequences=2", "run.wandb=disabled", *overrides,
    ]


def _descendants(pid: int) -> list[int]:
    """Ranks, and what they have started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [p for child in map(int, children) for p in (child, *_descendants(child))]


def _alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and path.read_bytes() != b""  # empty: ended, not yet reaped


def test_kill_during_save_resumes_from_the_previous_checkpoint(tmp_path):
    """X6 in small: kill -9 of the driver while the second checkpoint is being written."""
    every_two = ("train.steps=6", "checkpoint.every_steps=2")
    subprocess.run(megastep_train(tmp_path, "whole", *every_two), check=True, capture_output=True, timeout=180)

    killed = tmp_path / "killed" / "checkpoints"
    process = subprocess.Popen(megastep_train(tmp_path, "killed", *every_two), stdout=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (killed / "step_4.partial").exists() and time.time() < deadline:
        time.sleep(0.005)
    family = _descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(map(_alive, family)) and time.time() < deadline:
        time.sleep(0.1)
    assert len(family) > 4 and not any(map(_alive, family)), "left behind"
    assert (killed / "step_4.partial").exists() and latest(killed).name == "step_2"

    subprocess.run(megastep_train(tmp_path, "killed", *every_two), check=True, capture_output=True, timeout=180)
    keys = ("step", "train/loss", "train/grad_norm", "train/lr")
    whole, resumed = ([[row[k] for k in keys] for row in read_metrics(tmp_path / n)] for n in ("whole", "killed"))
    assert resumed == whole and len(whole) == 6
    assert latest(killed).name == "step_6" and not list(killed.glob("*.partial"))
