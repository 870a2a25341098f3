"""X6: which checkpoint a run starts or resumes from, its own or that of another run."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import describe, write_manifest
from megastep.config import load
from megastep.errors import CheckpointError, RunDirError
from megastep.models.architecture import read_architecture
from megastep.trainer.rundir import Origin, Run
from tests.bad_input.harness import rejected
from tests.processes import alive, descendants
from tests.runs import LOCAL


def checkpoint(root: Path, step: int, position: dict[str, int] | None = None) -> Path:
    """The files that the driver reads."""
    folder = root / f"step_{step}"
    folder.mkdir(parents=True)
    LoopState(step, position or {}).write(folder)
    write_manifest(
        folder,
        describe(read_architecture(load(LOCAL, []).model.path), step, None, with_optimizer=True),
    )
    return folder


def find(root: Path, name: str, resume: Path | str = "auto", kl: float = 0.1) -> Run:
    config = load(
        LOCAL, [f"run.dir={root}", f"run.name={name}", f"run.resume={resume}", f"loss.kl_coef={kl}"]
    )
    run = Run.find(config, "local")
    run.create(config)
    run.lock.close()  # as if its process had ended
    return run


@pytest.fixture
def first(tmp_path) -> Path:
    """A run that was warm-started and trained for eight steps."""
    checkpoint(tmp_path / "first" / "start", 0)
    checkpoint(tmp_path / "first" / "checkpoints", 8)
    return tmp_path / "first"


def test_the_same_command_resumes_its_run(first, tmp_path):
    """Even if it names the checkpoint of another run: a requeued job repeats its command."""
    origin = first / "checkpoints" / "step_8"
    assert find(tmp_path, "second", origin).checkpoint == origin
    assert find(tmp_path, "second").checkpoint == origin  # killed before its first checkpoint
    own = checkpoint(tmp_path / "second" / "checkpoints", 10)
    assert find(tmp_path, "second", origin).checkpoint == own
    assert find(tmp_path, "second").checkpoint == own
    with pytest.raises(CheckpointError, match="step_10: is ahead of step 0"):
        find(tmp_path, "second", first / "start" / "step_0")


def test_the_kl_reference_stays_that_of_the_first_run(first, tmp_path):
    """Across any number of runs that start from each other's checkpoints, and resumes."""
    start = first / "start" / "step_0"
    assert find(tmp_path, "first").reference() == start
    assert find(tmp_path, "second", first / "checkpoints" / "step_8").reference() == start
    own = checkpoint(tmp_path / "second" / "checkpoints", 10)
    assert find(tmp_path, "second").reference() == start
    assert find(tmp_path, "third", own).reference() == start
    checkpoint(tmp_path / "third" / "checkpoints", 12)
    assert find(tmp_path, "third").reference() == start


def test_a_missing_kl_reference_is_an_error_if_it_is_needed(first, tmp_path):
    find(tmp_path, "second", first / "checkpoints" / "step_8")
    checkpoint(tmp_path / "second" / "checkpoints", 10)
    (first / "start").rename(first / "elsewhere")
    with pytest.raises(CheckpointError, match="first/start/step_0: no such checkpoint"):
        find(tmp_path, "second")
    assert find(tmp_path, "second", kl=0).state.step == 10


def test_start_checkpoints_of_this_run_and_of_another(first, tmp_path):
    assert find(tmp_path, "second", first / "start" / "step_0").comes_from_another
    checkpoint(tmp_path / "second" / "start", 0)
    assert not find(tmp_path, "second").comes_from_another
    assert not find(tmp_path, "new").comes_from_another


def test_resume_never_clears_the_origin(first, tmp_path):
    find(tmp_path, "second", first / "checkpoints" / "step_8")
    assert find(tmp_path, "second", "never").checkpoint is None
    assert find(tmp_path, "second").checkpoint is None


HOLDER = """
import sys, time
from pathlib import Path
from megastep.trainer.rundir import lock
held = lock(Path(sys.argv[1]))
if len(sys.argv) > 2:
    import os
    if os.fork() == 0:
        time.sleep(60)
print("held", flush=True)
time.sleep(60)
"""


def hold(folder: Path, *more: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *more],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_one_process_per_run(tmp_path):
    """C5: a second one ends with an error that names the holder. kill -9 unlocks the run."""
    folder = tmp_path / "r"
    folder.mkdir()
    holder = hold(folder)
    try:
        (line,) = rejected(
            "train", LOCAL, "warm_start.trajectories=0", f"run.dir={tmp_path}", "run.name=r"
        )
        assert line == (
            f"error: {folder}: in use by process {holder.pid} on {socket.gethostname()}; "
            "wait for it to end, stop it, or give another run.name"
        )
        assert [path.name for path in folder.iterdir()] == ["lock"]
    finally:
        holder.kill()
        holder.wait()
    find(tmp_path, "r")


def test_a_child_does_not_inherit_the_lock(tmp_path):
    """A forked child may outlive a killed parent."""
    folder = tmp_path / "r"
    folder.mkdir()
    holder = hold(folder, "fork")
    children = descendants(holder.pid)
    try:
        holder.kill()
        holder.wait()
        assert alive(children)
        find(tmp_path, "r")
    finally:
        for pid, _ in children:
            os.kill(pid, signal.SIGKILL)


def test_a_checkpoint_of_another_process_since_find_is_an_error(first, tmp_path):
    config = load(LOCAL, [f"run.dir={tmp_path}", "run.name=first"])
    run = Run.find(config, "local")
    checkpoint(first / "checkpoints", 9)
    with pytest.raises(RunDirError, match="another process has just written to it; start again"):
        run.create(config)


def test_a_run_with_a_start_does_not_go_on_with_another(first, tmp_path):
    """Its KL reference would be the start after a resume, and the other run's before."""
    folder = tmp_path / "taught"
    checkpoint(folder / "start", 0)
    run = Run(folder, checkpoint(first / "checkpoints", 4), LoopState(4))
    with pytest.raises(RunDirError, match="run.name = taught: has a start of its own"):
        run.create(load(LOCAL))


def test_the_kl_reference_after_sft_is_its_result(tmp_path):
    """Not the checkpoint that sft started from, which origin.json names."""
    before = tmp_path / "before" / "start" / "step_0"
    taught = tmp_path / "taught" / "start" / "step_0"
    for folder in (before, taught):
        folder.mkdir(parents=True)
    Origin(before, before).write(tmp_path / "taught")
    checkpoint = tmp_path / "taught" / "checkpoints" / "step_4"
    run = Run(tmp_path / "taught", checkpoint, LoopState(4))
    assert run.reference() == taught


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_x18_a_restart_continues_from_the_newest_checkpoint(resume, tmp_path):
    """As the next process would, under the same name and lock; without one, as this one did."""
    config = load(LOCAL, [f"run.dir={tmp_path}", f"run.resume={resume}"])
    run = Run.find(config, "local")  # a name with the time of day
    run.create(config)
    again = run.at_newest(config)
    assert (again.folder, again.checkpoint, again.last_row) == (run.folder, None, -1)
    assert again.where_it_begins == "from the beginning"
    saved = checkpoint(run.checkpoints, 3)
    again = again.at_newest(config)
    assert (again.folder, again.checkpoint, again.state.step) == (run.folder, saved, 3)
    assert again.where_it_begins == "after step 3" and again.last_row == 3
    assert again.lock is run.lock and not run.lock.closed


def test_x18_a_restart_of_a_run_that_came_from_another(first, tmp_path):
    origin = first / "checkpoints" / "step_8"
    config = load(LOCAL, [f"run.dir={tmp_path}", "run.name=second", f"run.resume={origin}"])
    run = Run.find(config, "local")
    run.create(config)
    assert run.at_newest(config).checkpoint == origin
    own = checkpoint(run.checkpoints, 9)
    assert run.at_newest(config).checkpoint == own


def test_x18_the_start_of_an_earlier_run_of_this_name_is_not_taken(first, tmp_path):
    """run.resume=never, and no checkpoint yet."""
    config = load(LOCAL, [f"run.dir={tmp_path}", "run.name=first", "run.resume=never"])
    (first / "checkpoints" / "step_8").rename(tmp_path / "elsewhere")
    run = Run.find(config, "local")
    run.create(config)
    assert run.at_newest(config).checkpoint is None
