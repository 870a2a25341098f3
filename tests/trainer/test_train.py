"""`megastep train` with Ray, vLLM and Megatron: learning, kills and resumes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from random import Random

import pytest

from megastep import cli
from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import latest, read_manifest
from megastep.report.metrics_log import read_metrics
from megastep.samples import store
from megastep.types import Group
from tests.policy.updates import steps_of
from tests.processes import alive, descendants, started, wait_for
from tests.runs import LOCAL, begin, exported, left, megastep, run, trained_ids

pytestmark = pytest.mark.timeout(1200)  # whole runs, on a machine that may be busy
# Held-out success in the shortened quickstart; the full one gains more than 0.55.
RISE = 0.25
LISTED = (
    "reward/mean",
    "reward/success",
    "rollout/turns_mean",
    "rollout/response_tokens_mean",
    "turn/count",
    "train/loss",
    "train/grad_norm",
    "train/tokens_computed",
    "train/tokens_distinct",
    "train/sequences_before_merge",
    "train/sequences_after_merge",
    "mismatch/kl",
    "mismatch/max_abs",
    "routing_replay/conflict_rate",
    "routing_replay/free_fraction",
    "time/rollout_s",
    "time/update_s",
    "time/sync_s",
)


# ---------------------------------------------------------------- learning


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The quickstart with a third of its steps."""
    folder = tmp_path_factory.mktemp("runs")
    done = run(
        megastep(
            "train", folder, "quick", "train.steps=8", "run.wandb=offline", "run.rollouts_every=8"
        )
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "quick", done


def test_s18_x2_success_of_held_out_prompts_rises(quick):
    """On real engines and ranks, from before the first training step to after the last."""
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
    """fp32 with routing replay: logprobs differ by rounding only. Shared prefixes are merged."""
    for row in read_metrics(quick[0])[1:]:
        assert row["mismatch/max_abs"] < 1e-3 and row["train/skipped"] == 0
        assert row["train/sequences_after_merge"] < row["train/sequences_before_merge"]
        assert row["train/optimizer_steps"] == 2


def test_the_run_directory_is_complete(quick):
    folder, done = quick
    files = {"config.yaml", "metrics.jsonl", "log.txt", "report.html", "curves.png"}
    folders = {"start", "checkpoints", "rollouts", "wandb"}
    assert files | folders <= {path.name for path in folder.iterdir()}
    assert "8/8" in done.stdout and f"checkpoint: {folder}/checkpoints/step_8" in done.stdout
    assert "held-out success" in done.stdout
    groups = store.read(folder / "rollouts" / "step_8.safetensors")
    assert sum(len(group.trajectories) for group in groups) == 256


def test_d7_wandb_is_written_offline(quick):
    (record,) = (quick[0] / "wandb").glob("offline-run-*/run-*.wandb")
    assert record.stat().st_size > 1000


def test_output_is_quiet(quick):
    """Warnings of libraries are in log.txt, not on the terminal."""
    assert quick[1].stderr.strip() == ""
    assert "Transformer Engine and Apex are not installed" in (quick[0] / "log.txt").read_text()


def test_a_finished_run_does_not_train_again(quick):
    again = run(megastep("train", quick[0].parent, "quick", "train.steps=8"))
    assert again.returncode == 0 and "has its 8 steps;" in again.stdout


def test_a_new_run_is_rejected_in_a_folder_with_newer_checkpoints(quick, capsys):
    given = [f"run.dir={quick[0].parent}", "run.name=quick", "warm_start.trajectories=0"]
    for elsewhere in ("never", f"{quick[0]}/start/step_0"):
        assert cli.main(["train", LOCAL, *given, f"run.resume={elsewhere}"]) == 2
        assert "checkpoints/step_8: is ahead of step 0" in capsys.readouterr().err


def test_d6_checkpoint_of_the_run_exports_and_imports(quick, tmp_path):
    """tools/convert_ckpt.py, both ways, on a checkpoint of two expert-parallel ranks."""
    import torch

    from megastep.weights.hf_files import HFReader

    convert = [sys.executable, "tools/convert_ckpt.py"]
    first = tmp_path / "hf"
    again = tmp_path / "hf2"
    back = tmp_path / "ckpt"
    checkpoint = quick[0] / "checkpoints" / "step_8"
    subprocess.run(
        [*convert, "export", checkpoint, first, "--shard-size", "300KB"],
        check=True,
        capture_output=True,
    )
    subprocess.run([*convert, "import", first, back], check=True, capture_output=True)
    subprocess.run([*convert, "export", back, again], check=True, capture_output=True)
    one, two = HFReader(first), HFReader(again)
    assert set(one.file_of) == set(two.file_of) and len(set(one.file_of.values())) > 1
    assert all(torch.equal(one(name), two(name)) for name in one.file_of)
    assert json.loads((first / "config.json").read_text())["model_type"] == "qwen3_moe"


# ---------------------------------------------------------------- killed, resumed, interrupted

# One engine and one call at a time: every run has the same batches in the engine. With dynamic
# sampling the position in the data does not follow from the training step, and the KL term needs
# the initial policy.
SMALL = (
    "train.steps=6",
    "rollout.prompts=4",
    "rollout.samples_per_prompt=4",
    "rollout.concurrency=1",
    "train.mini_batch_prompts=2",
    "eval.prompts=4",
    "eval.samples_per_prompt=1",
    "filters.dynamic_sampling=true",
    "loss.kl_coef=0.01",
    "checkpoint.every_steps=1",
)


def numbers(folder) -> list[dict]:
    """All metrics but times, rates, restarts and those of agent workers."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("time/", "worker/", "policy/")) and "per_s" not in name
        }
        for row in read_metrics(folder)
    ]


@pytest.fixture(scope="module")
def killed(quick, tmp_path_factory):
    """A run of six training steps, and one that lost a rank in an update and another during the
    restart, was killed during a checkpoint, resumed, and lost ranks in a rollout and a weight sync.
    The driver runs the episodes of the first, agent workers those of the other."""
    folder = tmp_path_factory.mktemp("killed")
    start = f"run.resume={quick[0]}/start/step_0"
    whole = begin(megastep("train", folder, "whole", *SMALL, start))
    command = megastep("train", folder, "killed", *SMALL, "rollout.workers=2")
    victim = begin([*command, start])
    resumed = None
    try:
        checkpoints = folder / "killed" / "checkpoints"
        wait_for(lambda: (checkpoints / "step_1").exists() or victim.poll() is not None, 300)
        kill_rank(victim, r"\.\w+", after_rollout_of=folder / "killed")
        kill_rank(victim, r"\.start")
        wait_for(lambda: (checkpoints / "step_3").exists() or victim.poll() is not None, 300)
        family = descendants(victim.pid)
        step = kill_in_mid_save(victim, pids(family, "ray::PolicyRank"), checkpoints)
        is_partial = (checkpoints / f"step_{step}.partial").exists()
        after_kill = latest(checkpoints).name, is_partial, step
        wait_for(lambda: not left(family), 60)
        resumed = begin(command)
        is_saved = (checkpoints / f"step_{step}").exists
        wait_for(lambda: is_saved() or resumed.poll() is not None, 300)
        kill_rank(resumed, "")
        kill_rank(resumed, r"\.sync_weights")
        output, errors = resumed.communicate(timeout=300)
        assert resumed.returncode == 0, errors[-3000:]
        assert f"continues after step {step - 1}\n" in output
        assert whole.wait(300) == 0, whole.stderr.read()[-3000:]
    finally:
        for process in (whole, victim, resumed):
            if process is not None:
                process.kill()
    return folder, after_kill, victim.stdout.read(), output


def kill_rank(process, call: str, after_rollout_of=None) -> None:
    """kill -9 of one of two ranks when both are in this call, a pattern, or in none; the call after
    a rollout is an update."""

    def ranks() -> list[int]:
        """Pids, if both are in the call: Ray names processes after their calls."""
        lines = [line.split() for line in alive(descendants(process.pid))]
        found = {int(line[0]): line[1] for line in lines if "ray::PolicyRank" in line[-1]}
        first = sorted(found)[:2]  # they fork others, of higher pids
        calls = [re.fullmatch(f"ray::PolicyRank{call}", found[pid]) for pid in first]
        return first if len(calls) == 2 and all(calls) else []

    if after_rollout_of is not None:
        rollouts = after_rollout_of / "rollouts" / "latest.safetensors"
        before = rollouts.stat().st_mtime_ns
        wait_for(lambda: rollouts.stat().st_mtime_ns != before, 100)
    _, victim = wait_for(ranks, 100, every_s=0.01)
    start = started(victim)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: not alive({(victim, start)}), 20)


def kill_in_mid_save(process, ranks: list[int], checkpoints) -> int:
    """Kill the ranks, which write the checkpoint, then the driver; returns its training step."""
    deadline = time.time() + 200
    while time.time() < deadline:
        assert process.poll() is None, process.stderr.read()[-3000:]
        for path in checkpoints.glob("step_*.partial"):
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            process.kill()
            process.wait()
            return int(path.stem.removeprefix("step_"))
        time.sleep(0.001)
    raise TimeoutError


def test_x6_a_kill_during_a_save_leaves_the_previous_checkpoint(killed):
    folder, (newest, is_partial, step), *_ = killed
    assert newest == f"step_{step - 1}" and is_partial and step >= 4
    assert latest(folder / "killed" / "checkpoints").name == "step_6"
    assert not list((folder / "killed" / "checkpoints").glob("*.partial"))


def test_x6_x11_killed_and_resumed_is_the_same_run_bit_for_bit(killed, tmp_path):
    """Also with agent workers: trajectories do not depend on their number."""
    import torch

    folder, *_ = killed
    assert "worker/restarts" in read_metrics(folder / "killed")[-1]
    whole, resumed = numbers(folder / "whole"), numbers(folder / "killed")
    assert [row["step"] for row in whole] == list(range(7)) and resumed == whole
    assert any(row["train/grad_norm"] > 0 for row in whole[4:])
    assert whole[-1]["train/kl_reference"] > 0
    one = exported(folder / "whole" / "checkpoints" / "step_6", tmp_path / "whole")
    two = exported(folder / "killed" / "checkpoints" / "step_6", tmp_path / "killed")
    assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


def test_x18_lost_ranks_are_replaced(killed):
    """So the test above covers that too: in an update, a restart, a rollout and a weight sync."""
    folder, _, first, second = killed
    lines = [line for line in (first + second).splitlines() if "new ranks continue" in line]
    assert len(lines) == 4 and all(re.match(r"policy rank [01] died; new ranks", x) for x in lines)
    used = [re.search(r"after step (\d) \((\d) of train.restarts = 2", x).groups() for x in lines]
    assert [count for _, count in used[:3]] == ["1", "2", "1"] and used[0][0] == used[1][0]
    assert read_metrics(folder / "killed")[-1]["policy/restarts"] == 2  # of the second process
    assert read_metrics(folder / "whole")[-1]["policy/restarts"] == 0


def test_x5_dynamic_sampling_replaces_degenerate_groups(killed):
    """So the test above covers a position in the data that does not follow from the step."""
    rows = read_metrics(killed[0] / "whole")[1:]
    assert max(row["rollout/prompts"] for row in rows) > 4
    # Batches are still of four prompts.
    assert all(row["train/optimizer_steps"] == 2 and row["staleness/max"] == 0 for row in rows)


# ---------------------------------------------------------------- asynchronous


@pytest.fixture(scope="module")
def asynchronous(quick, tmp_path_factory):
    """The same quickstart from the same warm start, with rollouts a batch ahead of training."""
    folder = tmp_path_factory.mktemp("asynchronous")
    given = (
        "train.steps=8",
        "async.max_staleness=1",
        "run.rollouts_every=1",
        "train.eval_every=3",
        f"run.resume={quick[0]}/start/step_0",
    )
    done = run(megastep("train", folder, "run", *given))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def test_s15_asynchronous_training_learns(asynchronous):
    rows = read_metrics(asynchronous)
    first, last = rows[0]["eval/success"], rows[-1]["eval/success"]
    assert first <= 0.4 and last >= first + RISE, (first, last)
    assert rows[0]["eval/step"] == 0 and rows[-1]["eval/step"] == 8
    # An evaluation that ran alongside training.
    assert any(row.get("eval/step") in (3, 6) and row["step"] > row["eval/step"] for row in rows)


def test_s15_no_trained_token_is_staler_than_allowed(asynchronous):
    """By the versions of the tokens; importance sampling corrects for the staleness."""
    rows = read_metrics(asynchronous)
    for row in rows[1:]:
        versions = versions_of(asynchronous, row)
        assert max(versions) <= row["rollout/version"] - 2  # two optimizer steps per batch
        assert row["staleness/max"] <= 1 and row["rollout/version"] - min(versions) <= 2 * 2
        assert row["train/importance_mean"] == pytest.approx(1, abs=0.2)
    assert max(row["staleness/max"] for row in rows[1:]) == 1
    assert sum(row["async/dropped"] for row in rows[1:]) == 0
    assert any(row["train/importance_mean"] != 1 and row["mismatch/kl"] > 1e-6 for row in rows[1:])


def test_s5_s15_every_prompt_is_trained_once_and_counted_by_trajectory(asynchronous):
    assert sorted(trained_ids(asynchronous, 8)) == list(range(8 * 16))
    for row in read_metrics(asynchronous)[1:]:
        assert row["rollout/trajectories"] == 256
        assert row["turn/count"] == pytest.approx(256 * row["rollout/turns_mean"])


def test_x5_s15_asynchronous_dynamic_sampling(quick, tmp_path):
    """Degenerate groups are replaced, also by groups that began earlier.

    No group is trained twice or lost, though the run is stopped and resumed.
    """
    given = (
        *SMALL,
        "rollout.concurrency=16",
        "async.max_staleness=1",
        "run.rollouts_every=1",
        "eval.prompts=1",
        "checkpoint.every_steps=0",
        f"run.resume={quick[0]}/start/step_0",
    )
    process = begin(megastep("train", tmp_path, "both", *given))
    wait_for(lambda: len(read_metrics(tmp_path / "both")) > 2 or process.poll() is not None, 300)
    process.terminate()
    assert process.wait(120) == 75, process.stderr.read()[-3000:]
    saved = latest(tmp_path / "both" / "checkpoints")
    done = run(megastep("train", tmp_path, "both", *given))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"continues after step {saved.name[5:]}" in done.stdout
    rows = read_metrics(tmp_path / "both")[1:]
    trained = trained_ids(tmp_path / "both", 6)
    assert len(set(trained)) == len(trained) == sum(row["rollout/prompts"] for row in rows)
    assert len(trained) > 6 * 4
    state = LoopState.read(latest(tmp_path / "both" / "checkpoints"))
    outstanding = [*state.unfinished, *(group.id for group in state.ready)]
    assert sorted(trained + outstanding) == list(range(len(trained) + len(outstanding)))
    assert all(row["train/optimizer_steps"] == 2 and row["staleness/max"] <= 1 for row in rows)
    assert max(row["staleness/max"] for row in rows) == 1
    assert sum(row["filter/dropped"] for row in rows) > 0


KILLS = int(os.environ.get("MEGASTEP_KILLS", 4))
DRIVER = "megastep train"
VICTIMS = ("ray::Engine", "ray::PolicyRank", "ray::AgentWorker", DRIVER)


@pytest.mark.timeout(1200 + 120 * KILLS)
def test_x6_x18_s15_kills_anywhere_lose_and_repeat_nothing(quick, tmp_path):
    """Kills of an engine, a rank, an agent worker or the driver at random times; the last one is
    resumed by hand. MEGASTEP_KILLS=20 for more.

    A third of the kills of the driver happen while a resumed run starts and restores.
    """
    random = Random(0)
    steps = 4 + 4 * KILLS
    given = (
        f"train.steps={steps}",
        "rollout.prompts=4",
        "rollout.samples_per_prompt=4",
        "rollout.workers=2",
        "train.mini_batch_prompts=4",
        "async.max_staleness=1.5",
        "run.rollouts_every=1",
        "checkpoint.every_steps=2",
        "eval.prompts=2",
        "eval.samples_per_prompt=1",
        "policy.ranks=1",
        "policy.parallel.expert=1",
        "rollout.workers=1",  # routing by reference, also of the groups in checkpoints
    )
    folder = tmp_path / "killed"
    start = f"run.resume={quick[0]}/start/step_0"
    command = megastep("train", tmp_path, "killed", *given, start)
    ready: list[Group] = []
    process = begin(command)
    try:
        for number in range(KILLS):
            kind = VICTIMS[number % len(VICTIMS)]
            has_saved = latest(folder / "checkpoints") is not None
            early = kind == DRIVER and has_saved and random.random() < 1 / 3
            strike(process, kind, folder, early, 3 * random.random())
            if kind != DRIVER:
                continue  # the run replaces it by itself
            for path in folder.glob("checkpoints/step_*[0-9]/ready.safetensors"):
                ready += store.read(path)
            process = begin(command)  # the same command resumes
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]
    finally:
        process.kill()
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert sorted(trained_ids(folder, steps)) == list(range(4 * steps))
    # Every trajectory that was generated was trained on.
    assert sum(row["filter/dropped"] + row["async/dropped"] for row in rows[1:]) == 0
    before = read_manifest(quick[0] / "start" / "step_0")["optimizer_steps"]
    after = read_manifest(folder / "checkpoints" / f"step_{steps}")["optimizer_steps"]
    assert after == before + steps
    assert ready and all(step.routing is not None for step in steps_of(ready))
    staleness = [max_staleness(folder, row) for row in rows[1:]]
    assert staleness == [row["staleness/max"] for row in rows[1:]] and max(staleness) in (1, 2)


def versions_of(folder, row: dict) -> set[int]:
    """Weight versions of the tokens of a training step."""
    groups = store.read(folder / "rollouts" / f"step_{row['step']}.safetensors")
    return {int(version) for step in steps_of(groups) for version in step.versions[:, 0]}


def max_staleness(folder, row: dict) -> int:
    """Of the trained tokens, where a batch is one optimizer step."""
    return row["rollout/version"] - 1 - min(versions_of(folder, row))


def strike(process, kind: str, folder, early: bool, delay_s: float) -> None:
    """kill -9 after the next training step, or, early, once the driver runs; waits for its end."""
    seen = len(read_metrics(folder))

    def victims() -> list[int]:
        if kind == DRIVER:
            return [process.pid]
        return pids(descendants(process.pid), kind)

    def is_time() -> bool:
        if process.poll() is not None:
            return True
        return (early or len(read_metrics(folder)) > seen) and bool(victims())

    wait_for(is_time, 300)
    assert process.poll() is None, process.stderr.read()[-3000:]
    time.sleep(5 * delay_s if early else delay_s)
    family = descendants(process.pid)
    # The lowest pid: ranks fork processes that write checkpoints.
    os.kill(min(victims()), signal.SIGKILL)
    when = "early " if early else ""
    print(f"killed {kind} {when}after step {len(read_metrics(folder)) - 1}", flush=True)
    if kind == DRIVER:
        process.wait(120)
        wait_for(lambda: not left(family), 60)


def pids(family: set, name: str) -> list[int]:
    return [int(line.split()[0]) for line in alive(family) if name in line]
