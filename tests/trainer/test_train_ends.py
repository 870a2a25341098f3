"""`megastep train`: on saved rollouts, bad input, failures, SIGINT and SIGTERM."""

import argparse
import contextlib
import os
import signal
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from megastep import cli
from megastep.checkpoint.manifest import latest, read_manifest
from megastep.config import load
from megastep.errors import RunFailed
from megastep.report.metrics_log import read_metrics
from megastep.samples import store
from megastep.trainer.loop import Loop
from megastep.types import Group, Step, Trajectory
from tests.processes import alive, descendants, wait_for
from tests.runs import BARE, FEW, LOCAL, begin, exported, left, megastep, run, trained_ids

pytestmark = pytest.mark.timeout(1200)  # whole runs, on a machine that may be busy


# ---------------------------------------------------------------- saved rollouts


def rollout_of_turns(ids: range, turns: list[int]) -> list[Group]:
    """Groups of trajectories with these numbers of turns; sampled tokens are random."""
    random = np.random.default_rng(ids.start)

    def step(index: int, last: bool, prompt: np.ndarray, reward: float) -> Step:
        response = random.integers(4, 60, size=4, dtype=np.int32)
        return Step(
            index=index,
            last=last,
            prompt_ids=prompt,
            response_ids=response,
            loss_mask=np.ones(4, bool),
            logprobs=np.full(4, -4.0, np.float32),
            versions=np.array([[0, 4]], np.int32),
            reward=reward,
        )

    def trajectory(id: int, index: int, count: int) -> Trajectory:
        prompt = np.array([1, 4 + id], np.int32)
        steps: list[Step] = []
        for turn in range(count):
            last = turn == count - 1
            steps.append(step(turn, last, prompt, float(last and index == 0)))
            prompt = np.concatenate([prompt, steps[-1].response_ids, [3]]).astype(np.int32)
        return Trajectory(id, index, steps)

    return [Group(id, [trajectory(id, i, count) for i, count in enumerate(turns)]) for id in ids]


@pytest.fixture(scope="module")
def trained_on_saved(tmp_path_factory):
    """Two batches of six prompts: one turn each, and 1 to 9 turns. Packed flat and merged."""
    folder = tmp_path_factory.mktemp("saved")
    file = folder / "rollouts.safetensors"
    single = rollout_of_turns(range(6), [1] * 9)
    many = rollout_of_turns(range(6, 12), list(range(1, 10)))
    store.write(file, single + many)
    given = (
        "--rollouts",
        str(file),
        "rollout.prompts=6",
        "train.mini_batch_prompts=2",
        "routing_replay.enabled=false",
        "optimizer.warmup_steps=0",
    )
    processes = [
        begin(megastep("train", folder, layout, *given, f"train.pack_layout={layout}"))
        for layout in ("flat", "merge")
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
    return folder


def test_s13_optimizer_steps_depend_only_on_prompts(trained_on_saved):
    single, many = read_metrics(trained_on_saved / "merge")
    assert (single["turn/count"], many["turn/count"]) == (6 * 9, 6 * 45)
    assert single["train/optimizer_steps"] == many["train/optimizer_steps"] == 3
    assert many["train/tokens_trained"] == 6 * 45 * 4 and many["train/grad_norm"] > 0
    manifest = read_manifest(trained_on_saved / "merge" / "checkpoints" / "step_2")
    assert manifest["optimizer_steps"] == 6
    # No engine was started.
    assert "vllm" not in (trained_on_saved / "merge" / "log.txt").read_text()


def test_s18_steps_and_whole_trajectories_make_the_same_updates(trained_on_saved, tmp_path):
    """Every prompt extends the previous one, so that a trajectory can be one sequence."""
    steps = read_metrics(trained_on_saved / "flat")
    whole = read_metrics(trained_on_saved / "merge")
    assert [row["train/sequences_after_merge"] for row in steps] == [6 * 9, 6 * 45]
    assert [row["train/sequences_after_merge"] for row in whole] == [6 * 9, 6 * 9]
    names = ("train/loss", "train/grad_norm", "train/entropy", "mismatch/kl", "train/ratio_max")
    for name in names:
        by_step = [row[name] for row in steps]
        by_trajectory = [row[name] for row in whole]
        np.testing.assert_allclose(by_step, by_trajectory, rtol=1e-4, atol=1e-6)
    one = exported(trained_on_saved / "flat" / "checkpoints" / "step_2", tmp_path / "flat")
    two = exported(trained_on_saved / "merge" / "checkpoints" / "step_2", tmp_path / "merge")
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=2e-5, err_msg=name)


# ---------------------------------------------------------------- bad input and failures


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.stepz=1", "train.stepz: unknown key; did you mean train.steps?"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl: cannot be read (No such file or directory)"),
        ("data.held_out=0", "data.held_out = 0: there is nothing to evaluate on"),
        (
            "advantage.estimator=gae",
            "advantage.estimator = gae: temporal estimators give per-token values across steps",
        ),
        (
            "advantage.estimator=reinforce++",
            "advantage.estimator = reinforce++: temporal estimators",
        ),
        (
            "rollout.top_p=0.9",
            "rollout.top_p = 0.9: training needs logprobs of the whole distribution",
        ),
        ("rollout.top_k=5", "rollout.top_k = 5: training needs logprobs"),
        ("rollout.temperature=0", "rollout.temperature = 0: training needs logprobs"),
        ("filters.truncated=cut", "filters.truncated = cut: must be one of keep, mask, drop"),
        ("env.name=guess", "Guess has no demonstrations; write warm_start.trajectories: 0"),
        ("run.resume=nowhere", "nowhere: no such checkpoint"),
    ],
)
def test_s4_bad_input_is_one_line_before_any_process_starts(
    override, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    assert cli.main(["train", LOCAL, f"run.dir={tmp_path}", override]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith(f"error: {message}"), errors


def test_a_run_directory_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert cli.main(["train", LOCAL, f"run.dir={tmp_path}/file", "warm_start.trajectories=0"]) == 2
    assert f"error: {tmp_path}/file/local-" in capsys.readouterr().err


def test_a_training_error_of_a_rank_is_one_line(capsys, tmp_path):
    """Ray wraps it with the rank's traceback."""
    from ray.exceptions import RayTaskError

    from megastep.errors import TrainingError

    def fail(config):
        raise RayTaskError(
            "learn", "Traceback of the rank", TrainingError("the routes belong to other tokens")
        )

    args = argparse.Namespace(config=LOCAL, overrides=[f"run.dir={tmp_path}"])
    assert cli._run(args, fail) == 1
    assert capsys.readouterr().err.strip() == "error: the routes belong to other tokens"


def test_a_checkpoint_error_of_a_rank_is_exit_code_2_and_one_line(capsys, tmp_path):
    """As Ray raises it: an error of both classes, whose text is the rank's traceback."""
    from ray.exceptions import RayTaskError

    from megastep.errors import CheckpointError

    def fail(config):
        raise RayTaskError(
            "load", "Traceback\nof the rank", CheckpointError("step_3: damaged")
        ).as_instanceof_cause()

    args = argparse.Namespace(config=LOCAL, overrides=[f"run.dir={tmp_path}"])
    assert cli._run(args, fail) == 2
    assert capsys.readouterr().err == "error: step_3: damaged\n"


def test_x5_dynamic_sampling_fails_with_a_reason():
    given = ["filters.dynamic_sampling=true", "filters.max_batches=2", "rollout.prompts=2"]
    loop = SimpleNamespace(config=load(LOCAL, [*given, "train.mini_batch_prompts=2"]))
    group = Group(0, [])
    assert Loop.missing_groups(loop, [group], [group] * 2) == 1
    assert Loop.missing_groups(loop, [group] * 2, [group] * 4) == 0
    with pytest.raises(
        RunFailed, match="filters.max_batches = 2: of 4 prompts 1 had an advantage other than 0"
    ):
        Loop.missing_groups(loop, [group], [group] * 4)


def test_an_environment_that_always_raises_ends_the_run(tmp_path):
    process = begin(
        megastep("train", tmp_path, "broken", *BARE, "env.name=tests.envs.broken:Broken")
    )
    wait_for(lambda: [p for p in alive(descendants(process.pid)) if "ray::Engine" in p], 200)
    family = descendants(process.pid)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 1 and "Traceback" not in errors, errors[-3000:]
    (line,) = [line for line in errors.splitlines() if line]
    assert line.startswith(
        "error: all 256 episodes failed; the first (group 0, sample 0) by env_error: Connection"
    )
    wait_for(lambda: not left(family), 60)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(small_disk):
    process = begin(megastep("train", small_disk, "full", *BARE, *FEW, "train.steps=1000"))
    try:
        checkpoints = small_disk / "full" / "checkpoints"
        wait_for(lambda: latest(checkpoints) is not None or process.poll() is not None, 400)
        family = descendants(process.pid)
        fill(small_disk / "others")
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 1 and "Traceback" not in errors, errors[-3000:]
    (line,) = [line for line in errors.splitlines() if line]
    assert line.startswith(f"error: {small_disk}") and line.endswith("(No space left on device)")
    wait_for(lambda: not left(family), 60)
    saved = latest(checkpoints)
    assert saved is not None
    assert read_manifest(saved)["step"] == int(saved.name.removeprefix("step_"))


def fill(path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("phase", ["start", "warm start", "steps"])
def test_interrupt_leaves_no_process_and_the_last_checkpoint(phase, tmp_path):
    """Ctrl-C reaches every process of the terminal's foreground group."""
    given = FEW if phase == "warm start" else (*BARE, *FEW)
    process = begin(megastep("train", tmp_path, "stopped", *given))
    checkpoints = tmp_path / "stopped" / "checkpoints"
    try:
        if phase == "start":
            wait_for(lambda: [p for p in alive(descendants(process.pid)) if "ray::" in p], 200)
        elif phase == "warm start":
            next(line for line in process.stdout if line.startswith("warm start:"))
        else:
            wait_for(lambda: latest(checkpoints) is not None or process.poll() is not None, 400)
        family = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors[-3000:]
    assert "interrupted" in errors and "Traceback" not in errors, errors[-3000:]
    wait_for(lambda: not left(family), 60)
    saved = latest(checkpoints)
    assert (saved is None) == (phase != "steps")
    if saved is not None:
        assert read_manifest(saved)["step"] == int(saved.name.removeprefix("step_"))


def test_x6_sigterm_ends_with_a_checkpoint_to_resume_from(tmp_path):
    """Colocated: the checkpoint is written while the policy is offloaded."""
    given = (
        *BARE,
        *FEW,
        "checkpoint.every_steps=0",
        "run.rollouts_every=1",
        "cluster.colocate=true",
    )
    folder = tmp_path / "stopped"
    process = begin(megastep("train", tmp_path, "stopped", *given, "train.steps=1000"))
    try:
        wait_for(lambda: len(read_metrics(folder)) > 3 or process.poll() is not None, 400)
        family = descendants(process.pid)
        process.terminate()
        process.terminate()  # a second signal changes nothing
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    last = read_metrics(folder)[-1]["step"]
    saved = folder / "checkpoints" / f"step_{last}"
    hint = f"to resume from {saved}: the same command with run.name=stopped"
    assert process.returncode == 75, errors[-3000:]
    assert f"\nstopped after step {last}; {hint}\n" in errors, errors[-3000:]
    assert latest(folder / "checkpoints") == saved
    wait_for(lambda: not left(family), 60)
    done = run(megastep("train", tmp_path, "stopped", *given, f"train.steps={last + 2}"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"continues after step {last}" in done.stdout
    assert [row["step"] for row in read_metrics(folder)] == list(range(last + 3))
    assert sorted(trained_ids(folder, last + 2)) == list(range(2 * (last + 2)))
