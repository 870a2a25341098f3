"""D3: one placement group, an error if it does not fit, and no process left at the end."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from megastep.cluster import check_address, check_capacity, start_ray
from megastep.errors import ClusterError
from megastep.policy.actor import node_by_node
from tests.models import some_tokens
from tests.processes import alive, descendants, ray_folders, shared_memory_of, wait_for
from tests.sync.test_sender import greedy_with_transformers


def test_bundles_are_fitted_into_nodes():
    node = {"CPU": 8.0, "GPU": 4.0}
    check_capacity([{"CPU": 1, "GPU": 4}, {"CPU": 1, "GPU": 4}], [node, node])
    with pytest.raises(
        ClusterError,
        match="3 places with 12 GPU and 3 CPU in all are needed, 2 node.s. offer 4 GPU",
    ):
        check_capacity([{"CPU": 1, "GPU": 4}] * 3, [node, node])
    # There are 8 GPUs, but not on one node.
    with pytest.raises(ClusterError, match="set cluster.colocate"):
        check_capacity([{"CPU": 1, "GPU": 8}], [node, node])


def test_ranks_are_numbered_node_by_node_and_gpu_by_gpu():
    where = [("b", ["0"]), ("a", ["10"]), ("a", ["2"]), ("b", ["1"]), ("a", ["9"])]
    assert node_by_node(where) == [2, 4, 1, 0, 3]
    assert node_by_node([("a", []), ("a", [])]) == [0, 1]  # without GPUs: in order of reservation


def test_an_address_without_ray_fails_early():
    with pytest.raises(
        ClusterError, match=r"cluster.address = 127.0.0.1:1: no Ray there \(Connection refused\)"
    ):
        check_address("127.0.0.1:1")
    check_address("auto")
    with pytest.raises(
        ClusterError,
        match=r"\$RAY_ADDRESS = http://head:8265: Ray's client and HTTP addresses are not",
    ):
        check_address("http://head:8265")


@pytest.mark.parametrize("late", [2, 3])
def test_start_of_ray_is_retried(late, monkeypatch):
    """Processes of a failed start are killed first; the third failure is an error."""
    begun: list[subprocess.Popen] = []
    others = subprocess.Popen(["sleep", "600"])

    def init(address):
        begun.append(subprocess.Popen(["sleep", "600"]))
        if len(begun) <= late:
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr("ray.init", init)
    try:
        if late == 3:
            with pytest.raises(ClusterError, match="Ray did not start, 3 times"):
                start_ray()
        else:
            start_ray()
        assert len(begun) == 3 and [p.wait(5) for p in begun[:late]] == [-signal.SIGKILL] * late
        assert [p.poll() for p in (*begun[late:], others)] == [None] * (4 - late)
    finally:
        for process in [others, *begun]:
            process.kill()


def scene(name: str, folder) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster_scenes", name, str(folder)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def test_a_cluster_that_is_too_small_fails_early(models):
    """Before any actor starts; most of the time is the start of Ray."""
    process = scene("too_small", models("qwen3_moe")[0])
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 2
    (line,) = output.splitlines()
    assert line.startswith(
        "the cluster is too small: 1 places with 1000 CPU in all are needed, 1 node(s) offer "
    )
    assert line.endswith("; lower policy.ranks, engine.num_engines or cluster.cpus_per_process")


def test_d3_a_weight_sync_reaches_both_workers_of_an_engine(models):
    """engine.tensor_parallel = 2 in the placement group of a policy rank: vLLM must not choose its
    Ray executor. Greedy tokens are those of transformers, both workers have every checksum. Their
    experts are loaded by vLLM: an update without one of them is an error."""
    folder = models("qwen3_moe")[0]
    process = scene("sharded", folder)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    tokens, received, (error,) = map(json.loads, output.splitlines())
    assert tokens == greedy_with_transformers(f"{folder}-synced", some_tokens())[0]
    first, second = received
    assert first == second and len(first) == 3 + 4 * (
        8 + 1 + 8 * 3
    )  # layers: dense, router, experts
    assert "weights are missing in 1 layers, such as model.layers.1.mlp" in error


def test_nothing_is_left_behind(models):
    """After Ctrl-C and after a killed driver; unrelated processes survive, even with such names.

    The interrupted cluster is colocated, its model has tied embeddings.
    """
    folder = models("qwen2_tied")[0]
    unrelated = subprocess.Popen(
        ["bash", "-c", "exec -a 'ray::IDLE raylet VLLM::EngineCore' sleep 600"]
    )
    scenes = {name: scene(name, folder) for name in ("interrupted", "killed")}
    try:
        tokens = json.loads(scenes["interrupted"].stdout.readline())
        assert tokens == greedy_with_transformers(f"{folder}-synced", some_tokens())[0]
        below = {name: _up(process) for name, process in scenes.items()}
        segments = shared_memory_of(set().union(*below.values()))
        (ray_folder,) = ray_folders(below["interrupted"])
        scenes["interrupted"].send_signal(signal.SIGINT)
        scenes["killed"].kill()
        for name, process in scenes.items():
            process.wait(100)
            assert len(below[name]) >= 8  # of Ray, three of the engine, one of the rank
            wait_for(functools.partial(_has_ended, name, below[name]), 60)
        assert not [path for path in segments if os.path.exists(path)]
        assert not os.path.exists(ray_folder)
        assert unrelated.poll() is None
    finally:
        for process in [unrelated, *scenes.values()]:
            process.kill()


def _up(process: subprocess.Popen) -> set[tuple[int, str]]:
    """Processes below the driver, once it is up."""
    line = process.stdout.readline()
    assert line == "up\n", line + process.stderr.read()
    return descendants(process.pid)


def _has_ended(name: str, processes: set[tuple[int, str]]) -> bool:
    """After a kill Ray's two agents run for another minute, which is too long to wait for."""
    return not [line for line in alive(processes) if name != "killed" or "Agent" not in line]


def test_all_ports_are_local(rollouts):
    """Ports of Ray, the ranks' store, gloo and vLLM give anyone who reaches them code execution."""
    listening = {}
    for pid, _ in descendants(os.getpid()) | {(os.getpid(), "")}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            listening |= {
                (process.name(), c.laddr.port): c.laddr.ip
                for c in process.net_connections("inet")
                if c.status == psutil.CONN_LISTEN
            }
    names = {name for name, _ in listening}
    assert {"gcs_server", "raylet", "ray::PolicyRank"} <= names
    beyond = {
        place: ip
        for place, ip in listening.items()
        if not ip.removeprefix("::ffff:").startswith("127.")
    }
    assert not beyond, beyond


def test_ray_requires_its_token(rollouts):
    """Each run has its own token, in a folder that only its owner can read."""
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o077 == 0
    script = (
        "import sys; from ray._raylet import GcsClient; "
        "print(GcsClient(address=sys.argv[1]).internal_kv_keys(b'', b'session', timeout=10))"
    )
    command = [sys.executable, "-c", script, ray.get_runtime_context().gcs_address]
    without_token = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        "RAY_AUTH_MODE": "token"
    }

    def ask(**environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command, env=without_token | environment, capture_output=True, text=True, timeout=120
        )

    foreign = ask(RAY_AUTH_TOKEN="0" * 64)
    assert foreign.returncode != 0 and "InvalidAuthToken" in foreign.stderr, foreign.stderr[-500:]
    assert ask(RAY_AUTH_TOKEN_PATH=str(path)).returncode == 0
