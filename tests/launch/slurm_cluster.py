"""A real Slurm cluster of two nodes on this machine: one slurmctld and two slurmd.

    with two_nodes(folder) as cluster:
        job = cluster.submit("configs/chase.yaml", "train.steps=6")     # launch/slurm.sbatch
        job.wait()["ExitCode"]

Its folder holds configuration, state, logs and the output of the jobs. The daemons use free ports
and no authentication: no other Slurm is touched, and munge is not needed.
"""

import getpass
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megastep.distributed.ports import free_port
from tests.processes import alive, descendants, started, wait_for

ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2")
TIMEOUT_S = 300  # Ray and vLLM start in seconds, or in minutes on a busy machine
CONFIGURATION = """
ClusterName=megastep
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
ReturnToService=2
KillWait=15
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Job:
    def __init__(self, cluster: "SlurmCluster", id: int):
        self.cluster = cluster
        self.id = id
        self.raylets = [f"/tmp/megastep-{id}-{node}" for node in range(len(NODES))]  # folders
        self.logs = cluster.folder / f"slurm-{id}-ray"

    def show(self) -> dict[str, str]:
        """Slurm's record of the job: JobState, ExitCode, Restarts and more."""
        text = self.cluster.run("scontrol", "show", "job", "--oneliner", str(self.id))
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def is_in(self, *states: str) -> dict[str, str] | None:
        shown = self.show()
        return shown if shown["JobState"] in states else None

    def wait(self, *states: str) -> dict[str, str]:
        """Until the job is in one of these states, by default ended; fail with its output."""
        states = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        try:
            return wait_for(lambda: self.is_in(*states), TIMEOUT_S)
        except TimeoutError:
            pytest.fail(
                f"job {self.id} is {self.show()['JobState']} after {TIMEOUT_S} s:\n{self.output()}"
            )

    def output(self) -> str:
        return _read(self.cluster.folder / f"slurm-{self.id}.out")

    def log(self, node: int) -> str:
        """Ray's output on a node."""
        return _read(self.logs / f"{node}.log")

    def signal(self, name: str) -> None:
        """To the batch script only, as for a time limit."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", str(self.id))

    def cancel(self) -> None:
        self.cluster.run("scancel", str(self.id))

    def requeue(self) -> None:
        self.cluster.run("scontrol", "requeue", str(self.id))

    def begin_again(self) -> None:
        """Start now after a requeue, which Slurm delays by two minutes.

        Slurm sets the delay a moment after the job is pending, so the update is repeated.
        """
        # Nodes reject a credential of the second in which they were asked to end the job.
        time.sleep(2)

        def runs() -> bool:
            assert self.is_in("PENDING", "RUNNING"), self.output()
            self.cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now")
            with suppress(TimeoutError):
                return bool(wait_for(lambda: self.is_in("RUNNING"), 4))
            return False

        wait_for(runs, TIMEOUT_S)

    def family(self) -> set[tuple[int, str]]:
        """All processes of the job's steps, which are not below Slurm's daemons."""
        steps = [pid for pid, line in commands() if line.startswith(f"slurmstepd: [{self.id}.")]
        return set().union(*(descendants(pid) | {(pid, started(pid))} for pid in steps))

    def below_raylet(self, node: int) -> list[str]:
        """Command lines of Ray's processes on a node."""
        pids = [
            pid for pid, line in commands() if f"--raylet_socket_name={self.raylets[node]}/" in line
        ]
        return [line for pid in pids for line in alive(descendants(pid))]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def commands() -> list[tuple[int, str]]:
    """Process ids and command lines of all processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(bytes(1), b" ").decode()
            except OSError:
                continue  # it has just ended
            found.append((int(entry.name), line))
    return found


class SlurmCluster:
    def __init__(self, folder: Path):
        self.folder = folder
        self.daemons = []
        ports = [free_port() for _ in range(3)]
        text = CONFIGURATION.format(
            folder=folder, user=getpass.getuser(), ports=ports, first_job=100 * ports[0]
        )
        (folder / "slurm.conf").write_text(text)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()

    def environment(self) -> dict[str, str]:
        """This process's, without the variables of another Ray or another job."""
        others = ("RAY_", "SLURM", "SBATCH_", "MEGASTEP_")
        ours = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        return ours | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        for command in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)):
            with (self.folder / f"{command[0]}-{command[-1]}.log").open("w") as log:
                self.daemons.append(
                    subprocess.Popen(
                        [shutil.which(command[0], path=path), *command[1:]],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        env=self.environment(),
                        cwd=self.folder,
                        start_new_session=True,
                    )
                )
        wait_for(lambda: self.idle() == len(NODES), 60)

    def idle(self) -> int:
        sinfo = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %t"],
            env=self.environment(),
            text=True,
            capture_output=True,
            timeout=60,
        )
        return len(re.findall(r"\bidle$", sinfo.stdout, re.MULTILINE))

    def run(self, *command: str, **more: str) -> str:
        done = subprocess.run(
            command,
            env=self.environment() | more,
            cwd=self.folder,
            text=True,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, options: tuple[str, ...] = (), **variables: str) -> Job:
        """On both nodes, without GPUs; `variables`: see launch/slurm.sbatch."""
        given = {
            "MEGASTEP_ROOT": str(ROOT),
            "MEGASTEP_BIN": str(Path(sys.executable).parent),
        } | variables
        id = self.run(
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--gpus-per-node=0",
            *options,
            str(ROOT / "launch" / "slurm.sbatch"),
            *arguments,
            **given,
        )
        return Job(self, int(id))

    def close(self) -> None:
        """Jobs first: their processes are not below the daemons."""
        try:
            if len(self.daemons) == 1 + len(NODES):
                self.run("scancel", f"--user={getpass.getuser()}")
                wait_for(lambda: not self.run("squeue", "--noheader"), 60)
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
            for daemon in reversed(self.daemons):
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()


@contextmanager
def two_nodes(folder: Path) -> Iterator[SlurmCluster]:
    skip_without_slurm()
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def skip_without_slurm() -> None:
    """Install it where possible: a package of Debian and Ubuntu, which starts no daemon here."""
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
        return
    if not shutil.which("apt-get"):
        pytest.skip("Slurm is not installed, and apt-get is missing")
    if os.getuid() != 0:
        pytest.skip("Slurm is not installed, and root is needed for it: apt-get install slurm-wlm")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "slurm-wlm"]
    for command in (["apt-get", "update", "-q"], install):
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            text=True,
            capture_output=True,
            timeout=400,
        )
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1]
        pytest.skip(f"Slurm cannot be installed: {reason}")
