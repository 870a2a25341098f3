"""D5: launch/slurm.sbatch on a real Slurm of two nodes, with real Ray, vLLM and Megatron."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from megastep.checkpoint.manifest import latest
from megastep.distributed.ports import free_port
from megastep.report.metrics_log import read_metrics
from tests import processes
from tests.launch.slurm_cluster import ROOT, TIMEOUT_S, Job, commands, two_nodes
from tests.processes import alive, descendants
from tests.runs import trained_ids

pytestmark = pytest.mark.timeout(900)  # whole runs, on a machine that may be busy
CONFIG = "configs/chase.yaml"
STEPS = 8
# A node has one CPU and a process takes one: the rank and the engine are on different nodes.
TINY = (
    "cluster.cpus_per_process=1",
    "run.wandb=disabled",
    "warm_start.trajectories=0",
    "optimizer.warmup_steps=0",
    f"train.steps={STEPS}",
    "train.mini_batch_prompts=2",
    "rollout.prompts=2",
    "rollout.samples_per_prompt=2",
    "eval.prompts=2",
    "eval.samples_per_prompt=1",
    "checkpoint.every_steps=3",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with two_nodes(tmp_path_factory.mktemp("slurm")) as cluster:
        (cluster.folder / "root").symlink_to(ROOT)
        yield cluster


@pytest.fixture
def setup_file(tmp_path):
    """A file for MEGASTEP_SETUP; the command of the task that sources it is $@."""

    def write(text: str) -> str:
        (tmp_path / "setup.sh").write_text(text)
        return str(tmp_path / "setup.sh")

    return write


def wait_for(condition):
    return processes.wait_for(condition, TIMEOUT_S)


NO_RAY_ON = "if [[ $2 == *slurm_ray.sh && $SLURMD_NODENAME == {} ]]; then sleep 600; fi\n"


def assert_nothing_is_left(job: Job, family: set) -> None:
    wait_for(lambda: not alive(family | job.family()))
    assert not [folder for folder in job.raylets if os.path.exists(folder)]


# ---------------------------------------------------------------- a job that is requeued twice


@pytest.fixture(scope="module")
def requeued(cluster):
    """A job that is requeued by hand, then requeues itself at its time limit, then completes."""
    job = cluster.submit(CONFIG, *TINY, f"run.dir={cluster.folder}/runs")
    folder = cluster.folder / "runs" / f"chase-{job.id}"
    seen = SimpleNamespace(job=job, folder=folder, families=[], saved=[])

    def train_until(step: int) -> None:
        """Also record the job's processes."""
        wait_for(lambda: len(read_metrics(folder)) > step or job.is_in("COMPLETED", "FAILED"))
        assert job.is_in("RUNNING"), job.output()
        seen.families.append(job.family())

    def begin_again() -> None:
        wait_for(lambda: job.is_in("PENDING"))
        assert_nothing_is_left(job, seen.families[-1])
        seen.saved.append(int(latest(folder / "checkpoints").name.removeprefix("step_")))
        job.begin_again()
        wait_for(lambda: len(read_metrics(folder)) == seen.saved[-1] + 1)  # rows after it are gone

    train_until(4)
    seen.nodes = [job.below_raylet(node) for node in (0, 1)]
    job.requeue()
    begin_again()
    train_until(seen.saved[0] + 1)
    job.signal("USR1")
    begin_again()
    train_until(seen.saved[1] + 1)
    seen.end = job.wait()
    return seen


def test_d5_a_job_of_two_nodes_runs_to_its_end(requeued):
    assert (requeued.end["JobState"], requeued.end["ExitCode"], requeued.end["NumNodes"]) == (
        "COMPLETED",
        "0:0",
        "2",
    )
    assert [row["step"] for row in read_metrics(requeued.folder)] == list(range(STEPS + 1))
    assert latest(requeued.folder / "checkpoints").name == f"step_{STEPS}"
    assert f"checkpoint: {requeued.folder}/checkpoints/step_{STEPS}" in requeued.job.output()


def test_d5_ranks_and_engines_are_on_different_nodes(requeued):
    of_rank, of_engine = (
        [any(f"ray::{kind}" in line for line in lines) for lines in requeued.nodes]
        for kind in ("PolicyRank", "Engine")
    )
    assert sorted(of_rank) == [False, True] and of_engine == of_rank[::-1]


def test_d5_requeued_job_continues_from_its_last_checkpoint(requeued):
    """The first run was killed after training step 4, with a checkpoint of step 3, or of step 6."""
    starts = re.findall(
        r"chase-\d+: (a new run|continues after step \d+)$", requeued.job.output(), re.MULTILINE
    )
    assert starts == ["a new run", *(f"continues after step {step}" for step in requeued.saved)]
    assert requeued.saved[0] in (3, 6) and requeued.end["Restarts"] == "2"


def test_d5_job_at_its_time_limit_saves_and_requeues_itself(requeued):
    saved = requeued.saved[1]
    assert saved > requeued.saved[0] and f"\nstopped after step {saved};" in requeued.job.output()
    assert (
        f"job {requeued.job.id} is requeued and continues from its last checkpoint"
        in requeued.job.output()
    )


def test_d5_nothing_of_a_job_is_left(requeued):
    """After the last run, as after each requeue."""
    assert all(len(family) > 20 for family in requeued.families)
    assert_nothing_is_left(requeued.job, set().union(*requeued.families))
    assert {path.name for path in requeued.job.logs.iterdir()} == {"0.log", "1.log"}


# ---------------------------------------------------------------- failed jobs


@pytest.mark.parametrize(
    "arguments, variables, message",
    [
        (
            (),
            {},
            "slurm.sbatch: error: no CONFIG; sbatch --nodes=2 launch/slurm.sbatch CONFIG "
            "[key=value ...]",
        ),
        (
            (CONFIG,),
            {"MEGASTEP_BIN": "/nowhere"},
            "error: /nowhere/megastep: no such program; set MEGASTEP_BIN",
        ),
        (
            (CONFIG,),
            {"MEGASTEP_ROOT": "/nowhere"},
            "slurm.sbatch: error: /nowhere: not the project's root; submit",
        ),
        (
            (CONFIG,),
            {"MEGASTEP_NODES_TIMEOUT_S": "soon"},
            "error: MEGASTEP_NODES_TIMEOUT_S = soon: must be a number",
        ),
        (
            (CONFIG,),
            {"MEGASTEP_SETUP": "/nowhere/a.env"},
            "error: MEGASTEP_SETUP=/nowhere/a.env: no such file, or not",
        ),
        (
            (CONFIG,),
            {"MEGASTEP_MODULES": "gcc/13", "BASH_FUNC_module%%": "() { false; }"},
            "slurm.sbatch: error: MEGASTEP_MODULES=gcc/13: cannot be loaded",
        ),
        # A relative root with its .venv: only the setting is wrong.
        (
            (CONFIG, "train.stepz=1"),
            {"MEGASTEP_ROOT": "root", "MEGASTEP_BIN": ""},
            "error: train.stepz: unknown key; did you mean train.steps?",
        ),
    ],
)
def test_d5_bad_input_is_one_line_and_exit_code_2(arguments, variables, message, cluster):
    """Including errors of the config, before Ray has started."""
    job = cluster.submit(*arguments, **variables)
    assert job.wait()["ExitCode"] == "2:0"
    (line,) = [
        line
        for line in job.output().splitlines()
        if "error: " in line and not line.startswith("srun:")
    ]
    assert line.startswith(message)
    assert_nothing_is_left(job, set())


def test_d5_the_exit_code_is_that_of_training(cluster):
    """Training finds this cluster too small. Modules are loaded by the exported shell function."""
    modules = {
        "MEGASTEP_MODULES": "cuda/13.0 gcc/13",
        "BASH_FUNC_module%%": '() { echo "module $*"; }',
    }
    job = cluster.submit(
        CONFIG,
        *TINY,
        f"run.dir={cluster.folder}/runs",
        "run.name=mine",
        "cluster.cpus_per_process=2",
        **modules,
    )
    family = wait_for(lambda: job.below_raylet(1) and job.family())
    assert job.wait()["ExitCode"] == "1:0"
    assert job.output().startswith("module load cuda/13.0 gcc/13\n")
    assert "error: the cluster is too small: 2 places with 4 CPU in all are needed" in job.output()
    assert (
        "slurm.sbatch: failed; to continue, submit it again as before, with run.name=mine\n"
        in job.output()
    )
    assert_nothing_is_left(job, family)


def test_d5_tasks_are_in_the_container(cluster, tmp_path):
    """By the options of srun; pyxis is not installed."""
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/$$.arguments\nexit 2\n')
    srun.chmod(0o755)
    given = {
        "MEGASTEP_CONTAINER": "megastep.sqsh",
        "MEGASTEP_MOUNTS": "/data:/data,/models:/weights",
    }
    job = cluster.submit(CONFIG, *TINY, PATH=f"{tmp_path}:{os.environ['PATH']}", **given)
    assert job.wait()["ExitCode"] == "2:0"
    mounts = f"{ROOT}:{ROOT},/tmp:/tmp,{job.logs}:{job.logs},/data:/data,/models:/weights"
    steps = [path.read_text().splitlines() for path in tmp_path.glob("*.arguments")]
    assert sorted(steps, key=len)[0][-2:] == ["bash", "launch/slurm_ray.sh"] and len(steps) == 2
    for step in steps:
        assert [option for option in step if option.startswith("--container")] == [
            "--container-image=megastep.sqsh",
            f"--container-mounts={mounts}",
            f"--container-workdir={ROOT}",
        ]


def test_d5_node_without_ray_is_named(cluster, setup_file):
    setup = setup_file("echo $SLURMD_NODENAME is set up\n" + NO_RAY_ON.format("n2") + "false\n")
    job = cluster.submit(CONFIG, *TINY, MEGASTEP_SETUP=setup, MEGASTEP_NODES_TIMEOUT_S="8")
    family = wait_for(lambda: "n2 is set up" in job.log(1) and job.family())
    assert job.wait()["ExitCode"] == "1:0"
    line = f"error: n2: no Ray after 8 s (MEGASTEP_NODES_TIMEOUT_S); logs: {job.logs}/1.log"
    assert line in job.output().splitlines()
    assert_nothing_is_left(job, family)


def kill_raylet(job: Job, node: int) -> None:
    (raylet,) = [
        pid for pid, line in commands() if f"--raylet_socket_name={job.raylets[node]}/" in line
    ]
    os.kill(raylet, signal.SIGKILL)


def test_d5_a_first_node_whose_ray_dies_ends_the_job(cluster):
    """Nothing was saved, so the job does not requeue itself."""
    job = cluster.submit(CONFIG, *TINY, f"run.dir={cluster.folder}/runs", "run.name=dead")
    wait_for(lambda: "dead: a new run" in job.output())
    family = job.family()
    kill_raylet(job, 0)
    assert job.wait()["ExitCode"] == "75:0"
    assert f"error: Ray has ended on n1; logs: {job.logs}" in job.output()
    assert "slurm.sbatch: stopped before anything was saved, and not requeued" in job.output()
    assert "Ray ended by itself, with exit code 1" in job.log(0)
    assert_nothing_is_left(job, family)


def test_d5_x18_a_job_outlives_ray_on_a_node_and_is_requeued_without_the_head(cluster):
    """First the node of the rank, or that of the engine, loses Ray, later the head."""
    given = (*TINY, "train.steps=1000", "run.rollouts_every=1", f"run.dir={cluster.folder}/runs")
    job = cluster.submit(CONFIG, *given, "run.name=outlives")
    folder = cluster.folder / "runs" / "outlives"
    wait_for(lambda: len(read_metrics(folder)) > 4 or not job.is_in("PENDING", "RUNNING"))
    family = job.family()
    kill_raylet(job, 1)

    def steps_since() -> list[int]:
        """Training steps after the restart of ranks or engine."""
        rows = read_metrics(folder)[1:]
        return [r["step"] for r in rows if r["policy/restarts"] + r["engine/restarts"] > 0]

    wait_for(lambda: steps_since() or not job.is_in("RUNNING"))
    assert job.is_in("RUNNING"), job.output()
    assert "Ray starts again" in job.log(1) and job.show()["Restarts"] == "0"
    kill_raylet(job, 0)
    job.wait("PENDING")
    assert f"error: Ray has ended on n1; logs: {job.logs}" in job.output()
    assert f"job {job.id} is requeued and continues from its last checkpoint" in job.output()
    last = steps_since()[-1]
    assert sorted(trained_ids(folder, last)) == list(range(2 * last))
    job.cancel()
    assert_nothing_is_left(job, family)


# ---------------------------------------------------------------- stopped jobs


def test_d5_slurm_signals_a_job_ten_minutes_before_its_time_limit(cluster, setup_file):
    """By --signal in the script. With a limit of eleven minutes it is due after 30 to 60 seconds:
    Slurm checks twice a minute. Nothing was saved by then, so the job does not requeue itself.
    """
    job = cluster.submit(
        CONFIG, *TINY, options=("--time=11",), MEGASTEP_SETUP=setup_file(NO_RAY_ON.format("n*"))
    )
    wait_for(lambda: job.is_in("RUNNING"))
    processes.wait_for(lambda: "asking training to stop with a checkpoint" in job.output(), 120)
    assert job.wait()["ExitCode"] == "75:0"
    line = job.output().splitlines()[-1]
    assert (
        "stopped before anything was saved, and not requeued" in line
        and "give it a longer --time" in line
    )
    assert line.endswith(f"to continue, submit it again as before, with run.name=chase-{job.id}")


def test_d5_a_second_signal_ends_training_that_does_not_stop(cluster, setup_file):
    """A job that may not be requeued prints how to continue."""
    setup = setup_file(NO_RAY_ON.format("n*") + "if [[ $1 == python ]]; then trap '' TERM; fi\n")
    job = cluster.submit(
        CONFIG, *TINY, "run.name=of mine", options=("--no-requeue",), MEGASTEP_SETUP=setup
    )
    wait_for((job.logs / "run.name").exists)
    family = job.family()
    job.signal("TERM")
    wait_for(lambda: "asking training to stop" in job.output())
    with pytest.raises(TimeoutError):
        processes.wait_for(lambda: not job.is_in("RUNNING"), 2)
    job.signal("USR1")
    assert job.wait()["ExitCode"] == "75:0"
    line = "slurm.sbatch: stopped; to continue, submit it again as before, with run.name=of\\ mine"
    assert job.output().splitlines()[-1] == line
    assert_nothing_is_left(job, family)


def test_d5_a_signal_to_the_steps_alone_stops_the_job(cluster, setup_file):
    """It reaches every process here, so that Ray ends and nothing is saved; that is no failure."""
    job = cluster.submit(CONFIG, *TINY, MEGASTEP_SETUP=setup_file(NO_RAY_ON.format("n2")))
    family = wait_for(lambda: "Ray runtime started" in job.log(0) and job.family())
    cluster.run("scancel", "--signal=TERM", str(job.id))
    assert job.wait()["ExitCode"] == "75:0"
    assert "slurm.sbatch: stopped before anything was saved, and not requeued" in job.output()
    assert "error: Ray has ended" not in job.output()
    assert_nothing_is_left(job, family)


def test_d5_ray_outlives_a_signal_that_is_for_training(tmp_path):
    """With cgroups Slurm signals the tasks only; the Ray here is a program that sleeps."""
    (tmp_path / "ray").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ray").chmod(0o755)
    folder = Path(f"/tmp/megastep-{free_port()}-0")
    notes = tmp_path / "terminated"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": folder.name.split("-")[1],
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "n1",
        "MEGASTEP_LOGS": str(tmp_path),
        "RAY_ADDRESS": "127.0.0.1:1",
        "MEGASTEP_CLIENT_PORT": "1",
    }
    with subprocess.Popen(["bash", ROOT / "launch" / "slurm_ray.sh"], env=environment) as task:
        wait_for(lambda: [line for line in alive(descendants(task.pid)) if "sleep 60" in line])
        task.send_signal(signal.SIGTERM)
        wait_for(notes.exists)
        with pytest.raises(subprocess.TimeoutExpired):
            task.wait(1)
        assert folder.exists()
        task.send_signal(signal.SIGURG)
        assert task.wait(20) == 0 and not folder.exists()
    assert not (tmp_path / "lost").exists()


def test_d5_cancelled_job_is_not_requeued(cluster, setup_file, folders):
    job = cluster.submit(CONFIG, *TINY, MEGASTEP_SETUP=setup_file(NO_RAY_ON.format("n2")))
    family = wait_for(lambda: "Ray runtime started" in job.log(0) and job.family())
    assert [folder.exists() for folder in folders] == [False, True]
    job.cancel()
    assert job.wait()["JobState"] == "CANCELLED"
    wait_for(lambda: not alive(family | job.family()))
    assert job.show()["Restarts"] == "0" and job.is_in("CANCELLED")
    shutil.rmtree(job.raylets[0], ignore_errors=True)  # the next job would


@pytest.fixture
def folders():
    """Folders of Ray: of a killed job and of a running one."""
    number = free_port()
    dead, running = (Path(f"/tmp/megastep-{number}-{node}") for node in (0, 1))
    dead.mkdir()
    running.mkdir()
    with subprocess.Popen(["flock", running, "sleep", "600"], start_new_session=True) as holder:
        yield dead, running
        os.killpg(holder.pid, signal.SIGKILL)
    shutil.rmtree(running)
