"""The training task of slurm.sbatch: check the config, wait for Ray, exec `megastep train`.

    python launch/slurm_train.py CONFIG [key=value ...]

The process stays the same; its pid is in $MEGASTEP_LOGS/train.pid, for SIGTERM, next to run.name
and run.folder. Exit code 2: a mistake in the config or a variable; 1: a node without Ray.
"""

import os
import socket
import sys
import time
from pathlib import Path

from megastep.config import load
from megastep.errors import ConfigError

POLL_S = 0.5


def main(config: str, *overrides: str) -> int:
    logs = Path(os.environ["MEGASTEP_LOGS"])
    (logs / "train.pid").write_text(str(os.getpid()))
    seconds = os.environ.get("MEGASTEP_NODES_TIMEOUT_S", "300")
    try:
        timeout_s = float(seconds)
    except ValueError:
        problem = f"MEGASTEP_NODES_TIMEOUT_S = {seconds}: must be a number of seconds"
        return report([problem], exit_code=2)
    try:
        run = load(config, list(overrides)).run
    except ConfigError as error:
        return report(error.problems, exit_code=2)
    # A requeued job keeps its number, and so its run.
    name = run.name or f"{Path(config).stem}-{os.environ['SLURM_JOB_ID']}"
    (logs / "run.name").write_text(name)
    (logs / "run.folder").write_text(str(Path.cwd() / run.dir / name))

    hosts = os.environ["MEGASTEP_HOSTS"].split()
    missing = await_nodes(hosts, os.environ["RAY_ADDRESS"], timeout_s)
    if missing:
        timeout = f"{timeout_s:g} s (MEGASTEP_NODES_TIMEOUT_S)"
        problems = [
            f"{host}: no Ray after {timeout}; logs: {logs}/{hosts.index(host)}.log"
            for host in missing
        ]
        return report(problems, exit_code=1)
    command = ["megastep", "train", config, *overrides, f"run.name={name}"]
    sys.stdout.flush()
    os.execvp(command[0], command)


def report(problems: list[str], exit_code: int) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return exit_code


def await_nodes(hosts: list[str], address: str, timeout_s: float) -> list[str]:
    """The hosts without Ray at the timeout."""
    deadline = time.monotonic() + timeout_s
    missing = hosts
    while missing and time.monotonic() < deadline:
        if is_open(address):
            running = nodes_of_ray(address)
            missing = [host for host in hosts if host not in running]
        if missing:
            time.sleep(POLL_S)
    return missing


def is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def nodes_of_ray(address: str) -> set[str]:
    """Names of the live nodes. Not through `ray.init`, which starts a process per CPU."""
    from ray._raylet import GcsClient
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    nodes = GcsClient(address=address).get_all_node_info(
        timeout=30, state_filter=GcsNodeInfo.GcsNodeState.ALIVE
    )
    return {node.node_name for node in nodes.values()}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
