"""The main job through the command line: Ray, vLLM and Megatron, learning, being killed, going on."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from random import Random

import numpy as np
import pytest

from megastep import cli
from megastep.config import load
from megastep.policy.manifest import latest, read_manifest
from megastep.report import read_metrics
from megastep.rundir import RunError
from megastep.samples import store
from megastep.train import Loop
from megastep.types import Group, Step, Trajectory
from tests.processes import alive, descendants, wait_for

LOCAL = "configs/local.yaml"
pytestmark = pytest.mark.timeout(1200)  # whole runs, on a machine that may be busy
RISE = 0.25  # of held-out success in the shortened quickstart; the whole one gains more than 0.55
LISTED = (
    "reward/mean", "reward/success", "rollout/turns_mean", "rollout/response_tokens_mean", "turn/count", "train/loss",
    "train/grad_norm", "train/tokens_computed", "train/tokens_distinct", "train/sequences_before_merge",
    "train/sequences_after_merge", "mismatch/kl", "mismatch/max_abs", "replay/conflict_rate", "replay/free_fraction",
    "time/rollout_s", "time/update_s", "time/sync_s",
)


def megastep(command: str, folder, name: str, *more: str) -> list[str]:
    given = [f"run.dir={folder}", f"run.name={name}", "run.wandb=disabled", *more]
    return [sys.executable, "-m", "megastep", command, LOCAL, *given]


def run(command: list[str], timeout: int = 1000) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def begin(command: list[str]) -> subprocess.Popen:
    """In a process group of its own, as a shell would start it."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                            start_new_session=True)


def left(processes: set) -> list[str]:
    """Ray's two agents take a minute to notice that its other processes have ended."""
    return [line for line in alive(processes) if "Agent" not in line]


# ---------------------------------------------------------------- learning


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The quickstart with a third of its steps."""
    folder = tmp_path_factory.mktemp("runs")
    done = run(megastep("train", folder, "quick", "train.steps=8", "run.wandb=offline", "run.rollouts_every=8"))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "quick", done


def test_s18_x2_success_of_held_out_prompts_rises(quick):
    """On real engines and ranks; what is compared was sampled before the first step and after the last."""
    rows = read_metrics(quick[0])
    assert [row["step"] for row in rows] == list(range(9))
    first, last = rows[0]["eval/success"], rows[-1]["eval/success"]
    assert first <= 0.4 and last >= first + RISE, (first, last)


def test_s5_metrics_have_their_names_and_count_trajectories(quick):
    last = read_metrics(quick[0])[-1]
    assert not [name for name in LISTED if name not in last]
    assert last["rollout/trajectories"] == 256 and last["turn/count"] > 256
    assert last["turn/count"] == pytest.approx(256 * last["rollout/turns_mean"])
    assert last["eval/trajectories"] == 256 and "eval/pass_at_4" in last


def test_d2_the_trainer_sees_what_the_engine_sampled(quick):
    """fp32 and replayed experts: logprobs of both sides differ by rounding; the thinking is folded, not repeated."""
    for row in read_metrics(quick[0])[1:]:
        assert row["mismatch/max_abs"] < 1e-3 and row["train/skipped"] == 0
        assert row["train/sequences_after_merge"] < row["train/sequences_before_merge"]
        assert row["train/optimizer_steps"] == 2


def test_the_run_directory_is_complete(quick):
    folder, done = quick
    assert {"config.yaml", "metrics.jsonl", "log.txt", "start", "checkpoints", "rollouts", "wandb", "report.html",
            "curves.png"} <= {
        p.name for p in folder.iterdir()
    }
    assert "8/8" in done.stdout and f"checkpoint in {folder}/checkpoints/step_8" in done.stdout
    assert "held-out success" in done.stdout
    assert sum(len(g.trajectories) for g in store.read(folder / "rollouts" / "step_8.safetensors")) == 256


def test_d7_wandb_is_written_offline(quick):
    (record,) = (quick[0] / "wandb").glob("offline-run-*/run-*.wandb")
    assert record.stat().st_size > 1000


def test_output_is_quiet(quick):
    """Warnings of the libraries are in log.txt, not on the screen."""
    assert quick[1].stderr.strip() == ""
    assert "Transformer Engine and Apex are not installed" in (quick[0] / "log.txt").read_text()


def test_a_finished_run_says_so(quick):
    again = run(megastep("train", quick[0].parent, "quick", "train.steps=8"))
    assert again.returncode == 0 and "has its 8 steps already" in again.stdout


def test_a_run_does_not_begin_where_another_has_checkpoints(quick, capsys):
    given = [f"run.dir={quick[0].parent}", "run.name=quick", "warm_start.trajectories=0"]
    for elsewhere in ("never", f"{quick[0]}/start/step_0"):
        assert cli.main(["train", LOCAL, *given, f"run.resume={elsewhere}"]) == 2
        assert "checkpoints/step_8: is ahead of step 0" in capsys.readouterr().err


def test_d6_checkpoint_of_the_run_exports_and_imports(quick, tmp_path):
    """The tool, both ways, on a checkpoint that two expert-parallel ranks wrote."""
    import torch

    from megastep.sync.hf_files import HFReader

    convert = [sys.executable, "tools/convert_ckpt.py"]
    first, again, back = tmp_path / "hf", tmp_path / "hf2", tmp_path / "ckpt"
    checkpoint = quick[0] / "checkpoints" / "step_8"
    subprocess.run([*convert, "export", checkpoint, first, "--shard-size", "300KB"], check=True, capture_output=True)
    subprocess.run([*convert, "import", first, back], check=True, capture_output=True)
    subprocess.run([*convert, "export", back, again], check=True, capture_output=True)
    one, two = HFReader(first), HFReader(again)
    assert set(one.file_of) == set(two.file_of) and len(set(one.file_of.values())) > 1
    assert all(torch.equal(one(name), two(name)) for name in one.file_of)
    assert json.loads((first / "config.json").read_text())["model_type"] == "qwen3_moe"


# ---------------------------------------------------------------- killed, resumed, interrupted

# One engine and one call at a time: what shares a forward pass is then the same in every run. Dynamic sampling leaves
# groups that wait for the next step, and the KL needs the policy of the start.
SMALL = (
    "train.steps=6", "rollout.prompts=4", "rollout.samples=4", "rollout.concurrency=1", "train.mini_batch_prompts=2",
    "eval.prompts=4", "eval.samples=1", "filters.dynamic_sampling=true", "loss.kl=0.01", "checkpoint.every_steps=1",
)


def exported(checkpoint, folder) -> dict:
    from megastep.sync.hf_files import HFReader

    subprocess.run([sys.executable, "tools/convert_ckpt.py", "export", checkpoint, folder], check=True,
                   capture_output=True)
    reader = HFReader(folder)
    return {name: reader(name) for name in reader.file_of}


def numbers(folder) -> list[dict]:
    """All metrics but those that tell the time."""
    return [{name: value for name, value in row.items() if not name.startswith("time/") and "per_s" not in name}
            for row in read_metrics(folder)]


@pytest.fixture(scope="module")
def killed(quick, tmp_path_factory):
    """A run of six steps, and another that was killed while it wrote a checkpoint and then resumed."""
    folder = tmp_path_factory.mktemp("killed")
    start = f"run.resume={quick[0]}/start/step_0"
    whole = begin(megastep("train", folder, "whole", *SMALL, start))
    victim = begin(megastep("train", folder, "killed", *SMALL, start))
    try:
        checkpoints = folder / "killed" / "checkpoints"
        wait_for(lambda: (checkpoints / "step_3").exists() or victim.poll() is not None, 300)
        family = descendants(victim.pid)
        step = kill_in_mid_save(victim, pids(family, "ray::PolicyRank"), checkpoints)
        after_kill = latest(checkpoints).name, (checkpoints / f"step_{step}.partial").exists(), step
        wait_for(lambda: not left(family), 60)
        resumed = run(megastep("train", folder, "killed", *SMALL))
        assert resumed.returncode == 0, resumed.stderr[-3000:]
        assert f"continues after step {step - 1}" in resumed.stdout
        assert whole.wait(300) == 0, whole.stderr.read()[-3000:]
    finally:
        whole.kill()
        victim.kill()
    return folder, after_kill


def kill_in_mid_save(process, ranks: list[int], checkpoints) -> int:
    """The ranks, which write it, before the driver; returns the step of the checkpoint."""
    deadline = time.time() + 200
    while time.time() < deadline:
        for path in checkpoints.glob("step_*.partial"):
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            process.kill()
            process.wait()
            return int(path.stem.removeprefix("step_"))
        time.sleep(0.001)
    raise TimeoutError


def test_x6_a_kill_in_mid_save_leaves_the_checkpoint_before(killed):
    folder, (newest, is_partly_there, step) = killed
    assert newest == f"step_{step - 1}" and is_partly_there and step >= 4
    assert latest(folder / "killed" / "checkpoints").name == "step_6"
    assert not list((folder / "killed" / "checkpoints").glob("*.partial"))


def test_x6_killed_and_resumed_is_the_same_run_bit_for_bit(killed, tmp_path):
    import torch

    folder, _ = killed
    whole, resumed = numbers(folder / "whole"), numbers(folder / "killed")
    assert [row["step"] for row in whole] == list(range(7)) and resumed == whole
    assert any(row["train/grad_norm"] > 0 for row in whole[4:]) and whole[-1]["train/kl_reference"] > 0
    one, two = (exported(folder / n / "checkpoints" / "step_6", tmp_path / n) for n in ("whole", "killed"))
    assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


def test_x5_dynamic_sampling_plays_others_in_the_place_of_prompts_without_a_signal(killed):
    """So the test above has seen that the data's position survives, which does not follow from the step."""
    rows = read_metrics(killed[0] / "whole")[1:]
    assert max(row["rollout/prompts"] for row in rows) > 4
    assert all(row["train/optimizer_steps"] == 2 and row["age/max"] == 0 for row in rows)  # of four prompts each time


# ---------------------------------------------------------------- ahead of training


def trained_ids(folder, steps: int) -> list[int]:
    """Of every step, in the lineage of checkpoints that led to the last."""
    return [g.id for n in range(1, steps + 1) for g in store.read(folder / "rollouts" / f"step_{n}.safetensors")]


@pytest.fixture(scope="module")
def ahead(quick, tmp_path_factory):
    """The same quickstart from the same warm start, a batch ahead of training."""
    folder = tmp_path_factory.mktemp("ahead")
    given = ("train.steps=8", "async.max_staleness=1", "run.rollouts_every=1", "train.eval_every=3",
             f"run.resume={quick[0]}/start/step_0")
    done = run(megastep("train", folder, "ahead", *given))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "ahead"


def test_s15_it_learns_ahead_of_training(ahead):
    rows = read_metrics(ahead)
    first, last = rows[0]["eval/success"], rows[-1]["eval/success"]
    assert first <= 0.4 and last >= first + RISE, (first, last)
    assert rows[0]["eval/step"] == 0 and rows[-1]["eval/step"] == 8
    assert any(row.get("eval/step") in (3, 6) for row in rows[3:])  # beside training


def test_s15_no_trained_token_is_older_than_allowed(ahead):
    """From the tokens' own versions; and corrected by what the trainer makes of them."""
    rows = read_metrics(ahead)
    for row in rows[1:]:
        groups = store.read(ahead / "rollouts" / f"step_{row['step']}.safetensors")
        versions = {int(v) for g in groups for t in g.trajectories for s in t.steps for v in s.versions[:, 0]}
        assert max(versions) <= row["rollout/version"] - 2  # two optimizer steps a batch
        assert row["age/max"] <= 1 and row["rollout/version"] - min(versions) <= 2 * 2
        assert row["train/importance_mean"] == pytest.approx(1, abs=0.2)
    assert max(row["age/max"] for row in rows[1:]) == 1 and sum(row["async/dropped"] for row in rows[1:]) == 0
    assert any(row["train/importance_cut_fraction"] > 0 or row["mismatch/kl"] > 1e-6 for row in rows[1:])


def test_s5_s15_every_prompt_is_trained_once_and_counted_by_trajectory(ahead):
    assert sorted(trained_ids(ahead, 8)) == list(range(8 * 16))
    for row in read_metrics(ahead)[1:]:
        assert row["rollout/trajectories"] == 256
        assert row["turn/count"] == pytest.approx(256 * row["rollout/turns_mean"])


KILLS = int(os.environ.get("MEGASTEP_KILLS", 2))


@pytest.mark.timeout(1200 + 120 * KILLS)
def test_x6_s15_kills_anywhere_lose_and_repeat_nothing(quick, tmp_path):
    """MEGASTEP_KILLS=20 for more of them: an engine, a rank or the driver, at random moments."""
    random, steps = Random(0), 4 + 4 * KILLS
    kinds = [("ray::Engine", "megastep train", "ray::PolicyRank")[i % 3] for i in range(KILLS)]
    given = (f"train.steps={steps}", "rollout.prompts=4", "rollout.samples=4", "train.mini_batch_prompts=4",
             "async.max_staleness=1.5", "run.rollouts_every=1", "checkpoint.every_steps=1", "eval.prompts=2",
             "eval.samples=1", "policy.ranks=1", "policy.parallel.expert=1")
    folder, start = tmp_path / "killed", f"run.resume={quick[0]}/start/step_0"
    process = begin(megastep("train", tmp_path, "killed", *given, start))
    try:
        for kind in kinds:
            seen = len(read_metrics(folder))
            wait_for(lambda: len(read_metrics(folder)) > seen or process.poll() is not None, 300)
            assert process.poll() is None, process.stderr.read()[-3000:]
            time.sleep(3 * random.random())
            family = descendants(process.pid)
            (victim, *_) = [process.pid] if kind.startswith("megastep") else pids(family, kind)
            os.kill(victim, signal.SIGKILL)
            print(f"killed {kind} ({victim}) after step {len(read_metrics(folder)) - 1}", flush=True)
            if kind == "ray::Engine":
                continue  # the run goes on without it until it is back
            process.wait(120)
            wait_for(lambda: not left(family), 60)
            process = begin(megastep("train", tmp_path, "killed", *given))
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]
    finally:
        process.kill()
    assert sorted(trained_ids(folder, steps)) == list(range(4 * steps))
    rows = read_metrics(folder)[1:]
    assert sum(row["filter/dropped"] + row["async/dropped"] for row in rows) == 0  # all that was played was trained on
    ready = [store.read(path) for path in folder.glob("checkpoints/*/ready.safetensors")]
    assert all(step.routing is not None for groups in ready for g in groups for t in g.trajectories for step in t.steps)
    assert [row["step"] for row in read_metrics(folder)] == list(range(steps + 1))
    assert max(row["age/max"] for row in read_metrics(folder)[1:]) in (1, 2)


def pids(family: set, name: str) -> list[int]:
    return [int(line.split()[0]) for line in alive(family) if name in line]


# ---------------------------------------------------------------- the training half alone


def rollout_of_turns(ids: range, turns: list[int]) -> list[Group]:
    """Groups of trajectories with so many turns each; the sampled tokens are random."""
    random = np.random.default_rng(ids.start)

    def step(index: int, last: bool, prompt: np.ndarray, reward: float) -> Step:
        response = random.integers(4, 60, size=4, dtype=np.int32)
        return Step(index=index, last=last, prompt_ids=prompt, response_ids=response, loss_mask=np.ones(4, bool),
                    logprobs=np.full(4, -4.0, np.float32), versions=np.array([[0, 4]], np.int32), reward=reward)

    def trajectory(id: int, index: int, count: int) -> Trajectory:
        prompt, steps = np.array([1, 4 + id], np.int32), []
        for turn in range(count):
            last = turn == count - 1
            steps.append(step(turn, last, prompt, float(last and index == 0)))
            prompt = np.concatenate([prompt, steps[-1].response_ids, [3]]).astype(np.int32)
        return Trajectory(id, index, steps)

    return [Group(id, [trajectory(id, i, count) for i, count in enumerate(turns)]) for id in ids]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Two batches of six prompts, two prompts per optimizer step: one turn each, and 1 to 9 turns. Both step by step
    and as whole trajectories."""
    folder = tmp_path_factory.mktemp("replayed")
    file = folder / "rollouts.safetensors"
    store.write(file, rollout_of_turns(range(6), [1] * 9) + rollout_of_turns(range(6, 12), list(range(1, 10))))
    given = ("--rollouts", str(file), "rollout.prompts=6", "train.mini_batch_prompts=2", "replay.enabled=false",
             "optimizer.warmup_steps=0")
    layouts = [begin(megastep("replay", folder, layout, *given, f"samples.layout={layout}"))
               for layout in ("flat", "merge")]
    for process in layouts:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
    return folder


def test_s13_optimizer_steps_depend_on_prompts_alone(replayed):
    single, many = read_metrics(replayed / "merge")
    assert (single["turn/count"], many["turn/count"]) == (6 * 9, 6 * 45)
    assert single["train/optimizer_steps"] == many["train/optimizer_steps"] == 3
    assert many["train/tokens_trained"] == 6 * 45 * 4 and many["train/grad_norm"] > 0
    manifest = read_manifest(replayed / "merge" / "checkpoints" / "step_2")
    assert manifest["optimizer_steps"] == 6
    assert "vllm" not in (replayed / "merge" / "log.txt").read_text()  # no engine was started


def test_s18_steps_and_whole_trajectories_make_the_same_updates(replayed, tmp_path):
    """Every prompt extends the one before, so a trajectory can be one sequence; six optimizer steps, losses of each."""
    steps, whole = read_metrics(replayed / "flat"), read_metrics(replayed / "merge")
    assert [row["train/sequences_after_merge"] for row in steps] == [6 * 9, 6 * 45]
    assert [row["train/sequences_after_merge"] for row in whole] == [6 * 9, 6 * 9]
    for name in ("train/loss", "train/grad_norm", "train/entropy", "mismatch/kl", "train/ratio_max"):
        np.testing.assert_allclose([r[name] for r in steps], [r[name] for r in whole], rtol=1e-4, atol=1e-6)
    one, two = (exported(replayed / n / "checkpoints" / "step_2", tmp_path / n) for n in ("flat", "merge"))
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=2e-5, err_msg=name)


# ---------------------------------------------------------------- mistakes and failures


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.stepz=1", "train.stepz: unknown key; did you mean train.steps?"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl: cannot be read (No such file or directory)"),
        ("data.held_out=0", "data.held_out = 0: there is nothing to evaluate on"),
        ("credit.estimator=gae", "credit.estimator = gae: temporal estimators give per-token values across steps"),
        ("credit.estimator=reinforce++", "credit.estimator = reinforce++: temporal estimators"),
        ("rollout.top_p=0.9", "rollout.top_p = 0.9: training needs logprobs of the whole distribution"),
        ("rollout.top_k=5", "rollout.top_k = 5: training needs logprobs"),
        ("rollout.temperature=0", "rollout.temperature = 0: training needs logprobs"),
        ("filters.over_long=cut", "filters.over_long = cut: must be one of keep, mask, drop"),
        ("env.name=guess", "Guess has no demonstrations; write warm_start.trajectories: 0"),
        ("run.resume=nowhere", "nowhere: no such checkpoint"),
    ],
)
def test_s4_mistakes_are_a_line_each_before_anything_starts(override, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    assert cli.main(["train", LOCAL, f"run.dir={tmp_path}", override]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith(f"error: {message}"), errors


def test_a_run_directory_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert cli.main(["train", LOCAL, f"run.dir={tmp_path}/file", "warm_start.trajectories=0"]) == 1
    assert f"error: {tmp_path}/file/local-" in capsys.readouterr().err


def test_what_a_rank_refuses_is_a_line(capsys, tmp_path):
    """It comes through Ray, with the rank's traceback around it."""
    from ray.exceptions import RayTaskError

    from megastep.types import TrainingError

    def refuse(config):
        raise RayTaskError("learn", "Traceback of the rank", TrainingError("the routes belong to other tokens"))

    args = argparse.Namespace(config=LOCAL, overrides=[f"run.dir={tmp_path}"])
    assert cli._run(args, refuse) == 1
    assert capsys.readouterr().err.strip() == "error: the routes belong to other tokens"


def test_x5_dynamic_sampling_gives_up_with_a_reason():
    from types import SimpleNamespace

    given = ["filters.dynamic_sampling=true", "filters.max_batches=2", "rollout.prompts=2"]
    loop = SimpleNamespace(config=load(LOCAL, [*given, "train.mini_batch_prompts=2"]))
    group = Group(0, [])
    assert Loop.still_wanted(loop, [group], [group] * 2) == 1 and Loop.still_wanted(loop, [group] * 2, [group] * 4) == 0
    with pytest.raises(RunError, match="filters.max_batches = 2: of 4 prompts 1 had trajectories of different reward"):
        Loop.still_wanted(loop, [group], [group] * 4)


BARE = ("warm_start.trajectories=0", "policy.ranks=1", "policy.parallel.expert=1", "optimizer.warmup_steps=0")


def test_an_environment_that_always_raises_ends_the_run(tmp_path):
    process = begin(megastep("train", tmp_path, "broken", *BARE, "env.name=tests.envs.broken:Broken"))
    wait_for(lambda: [p for p in alive(descendants(process.pid)) if "ray::Engine" in p], 200)
    family = descendants(process.pid)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 1 and "Traceback" not in errors, errors[-3000:]
    (line,) = [line for line in errors.splitlines() if line]
    assert line.startswith("error: all 256 episodes failed; the first (group 0, sample 0) by env_error: Connection")
    wait_for(lambda: not left(family), 60)


FEW = ("rollout.prompts=2", "rollout.samples=2", "train.mini_batch_prompts=2", "eval.prompts=1", "eval.samples=1",
       "checkpoint.every_steps=1")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
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
    assert saved is not None and read_manifest(saved)["step"] == int(saved.name.removeprefix("step_"))


def fill(path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("phase", ["start", "warm start", "steps"])
def test_interrupt_leaves_no_process_and_the_last_checkpoint(phase, tmp_path):
    """Ctrl-C reaches every process of the terminal's foreground group."""
    process = begin(megastep("train", tmp_path, "stopped", *(() if phase == "warm start" else BARE), *FEW))
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
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors, errors[-3000:]
    wait_for(lambda: not left(family), 60)
    saved = latest(checkpoints)
    assert (saved is None) == (phase != "steps")
    if saved is not None:
        assert read_manifest(saved)["step"] == int(saved.name.removeprefix("step_"))


def test_x6_sigterm_ends_with_a_checkpoint_and_the_next_run_goes_on(tmp_path):
    """Engines and policy take turns here, so a checkpoint is written while the policy rests."""
    given = (*BARE, *FEW, "checkpoint.every_steps=0", "run.rollouts_every=1", "cluster.colocate=true")
    folder = tmp_path / "stopped"
    process = begin(megastep("train", tmp_path, "stopped", *given, "train.steps=1000"))
    try:
        wait_for(lambda: len(read_metrics(folder)) > 3 or process.poll() is not None, 400)
        family = descendants(process.pid)
        process.terminate()
        process.terminate()  # a second one changes nothing
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    last = read_metrics(folder)[-1]["step"]
    assert process.returncode == 75 and f"\nstopped after step {last}; the same command" in errors, errors[-3000:]
    assert latest(folder / "checkpoints").name == f"step_{last}"
    wait_for(lambda: not left(family), 60)
    done = run(megastep("train", tmp_path, "stopped", *given, f"train.steps={last + 2}"))
    assert done.returncode == 0 and f"continues after step {last}" in done.stdout, done.stderr[-3000:]
    assert [row["step"] for row in read_metrics(folder)] == list(range(last + 3))
    assert sorted(trained_ids(folder, last + 2)) == list(range(2 * (last + 2)))
