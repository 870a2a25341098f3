"""A real Ray cluster of two nodes on this machine: two `ray start --block`, each with its ports.

    with two_nodes(cpus=(2, 2)) as cluster:
        subprocess.run(..., env=cluster.environment())     # of a driver: RAY_ADDRESS and the token
        cluster.dashboard                                  # http://host:port, for `ray job`
        cluster.worker.kill()                              # a lost machine

Nodes are stopped by process id: `ray stop` would stop every Ray of the machine. Requests need a
token, as in every cluster whose head finds one at start.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megastep.distributed.ports import free_port
from megastep.distributed.processes import end_with_parent
from tests.processes import alive, command_line, descendants, started, wait_for

HOST = "127.0.0.1"
RAY = Path(sys.executable).with_name("ray")
# Ids of the nodes; ranks begin with the lower one.
HEAD, WORKER, SPARE = "b" * 56, "a" * 56, "9" * 56
PORTS = (
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)


def without_ray() -> dict[str, str]:
    """This process's environment without the variables of another Ray."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


class Node:
    """One `ray start --block` and everything below it."""

    def __init__(self, id: str, cpus: int, token: Path, *options: str):
        # It holds Ray's sockets, whose paths must be short.
        self.folder = tempfile.mkdtemp(prefix="ms-", dir="/tmp")
        self.output = Path(self.folder) / "output.txt"
        command = [
            str(RAY),
            "start",
            "--block",
            f"--node-ip-address={HOST}",
            f"--temp-dir={self.folder}",
            f"--num-cpus={cpus}",
            "--num-gpus=0",
            f"--object-store-memory={256 << 20}",
            "--disable-usage-stats",
            *(f"--{port}={free_port()}" for port in PORTS),
            *options,
        ]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=end_with_parent,  # with Ray's processes, if the tests are killed
                env=without_ray()
                | {
                    "RAY_AUTH_MODE": "token",
                    "RAY_AUTH_TOKEN_PATH": str(token),
                    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": id,
                    # A lost node is detected after 5 seconds, not 15.
                    "RAY_health_check_period_ms": "1000",
                },
            )

    def family(self) -> set[tuple[int, str]]:
        return {(self.process.pid, started(self.process.pid))} | descendants(self.process.pid)

    def kill(self) -> None:
        """At once, like a power failure: no process of the node can report anything."""
        family = self.family()
        _signal(family, signal.SIGSTOP)
        _signal(family, signal.SIGKILL)
        self.process.wait(20)

    def kill_raylet(self) -> None:
        """Its processes end with it."""
        (raylet,) = [p for p in self.family() if "raylet/raylet " in command_line(p[0])]
        _signal({raylet}, signal.SIGKILL)

    def end(self) -> None:
        """Terminate; kill what remains."""
        family = self.family()
        self.process.terminate()
        try:
            self.process.wait(20)
            wait_for(lambda: not alive(family), 20)
        except (subprocess.TimeoutExpired, TimeoutError):
            _signal(family, signal.SIGKILL)
            self.process.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)


def _signal(processes: set[tuple[int, str]], which: int) -> None:
    for pid, start in processes:
        if started(pid) == start:
            os.kill(pid, which)


class TwoNodes:
    def __init__(self, exits: ExitStack, cpus: tuple[int, int]):
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        self.token = folder / "token"
        self.token.write_text(uuid.uuid4().hex)
        port = free_port()
        dashboard = free_port()
        self.address = f"{HOST}:{port}"
        self.dashboard = f"http://{HOST}:{dashboard}"
        self.head = self._start(
            exits,
            1,
            HEAD,
            cpus[0],
            "--head",
            f"--port={port}",
            "--include-dashboard=true",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={free_port()}",
        )
        self.worker = self._start(exits, 2, WORKER, cpus[1], f"--address={self.address}")
        self._exits = exits

    def add(self, id: str, cpus: int) -> Node:
        """Another node, which joins the others."""
        return self._start(
            self._exits, len(self.nodes()) + 1, id, cpus, f"--address={self.address}"
        )

    def _start(self, exits: ExitStack, count: int, id: str, cpus: int, *options: str) -> Node:
        """Start node number `count`. On a busy machine Ray may time out, after half a minute."""
        for _ in range(3):
            node = Node(id, cpus, self.token, *options)
            exits.callback(node.end)
            process = node.process
            wait_for(lambda p=process: p.poll() is not None or self._has(count), 120)
            if process.poll() is None:
                return node
        raise RuntimeError(node.output.read_text())

    def _has(self, count: int) -> bool:
        try:
            return len(self.nodes()) == count
        except OSError:
            return False  # the dashboard is starting

    def environment(self, **more: str) -> dict[str, str]:
        """For a process that connects to this cluster."""
        given = {
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
        }
        return without_ray() | given | more

    def get(self, path: str) -> dict:
        request = urllib.request.Request(self.dashboard + path)
        request.add_header("Authorization", f"Bearer {self.token.read_text()}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def nodes(self) -> list[str]:
        """Ids of the live nodes."""
        return [node["node_id"] for node in self._list("nodes") if node["state"] == "ALIVE"]

    def actors(self) -> list[dict]:
        """Live actors, each with `class_name`, `node_id` and `pid`."""
        return [actor for actor in self._list("actors") if actor["state"] == "ALIVE"]

    def cpus_used(self) -> float | None:
        """Some seconds ago; None before Ray's first report."""
        usage = self.get("/api/cluster_status")["data"]["clusterStatus"]["loadMetricsReport"][
            "usage"
        ]
        return usage["CPU"][0] if "CPU" in usage else None

    def _list(self, what: str) -> list[dict]:
        return self.get(f"/api/v0/{what}?limit=1000")["data"]["result"]["result"]


@contextmanager
def two_nodes(cpus: tuple[int, int]) -> Iterator[TwoNodes]:
    with ExitStack() as exits:
        yield TwoNodes(exits, cpus)
