"""Placement with a fake Ray: what each config key requests. test_cluster.py has a real Ray."""

import os
import socket
from types import SimpleNamespace

import pytest

from megastep import cluster
from megastep.cluster import Cluster
from megastep.config import Config, load
from megastep.errors import ClusterError
from megastep.rollout.fleet import Fleet

CHASE = "configs/chase.yaml"


def make(monkeypatch, *given: str, gpus: int = 0, has_cuda: bool = False, **more) -> Cluster:
    resources = {"CPU": 8.0, "GPU": gpus} if gpus else {"CPU": 8.0}
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])
    return Cluster(load(CHASE, list(given), has_cuda=has_cuda), **more)


def test_bundles_are_those_of_ranks_and_engines(monkeypatch):
    """policy.ranks, engine.num_engines, engine.tensor_parallel, cluster.cpus_per_process,
    cluster.colocate.
    """
    given = [
        "policy.ranks=2",
        "engine.num_engines=3",
        "engine.tensor_parallel=2",
        "cluster.cpus_per_process=0.5",
    ]
    assert make(monkeypatch, *given)._bundles() == [{"CPU": 0.5}] * 5
    of_ranks = [{"CPU": 0.5, "GPU": 1}] * 2
    of_engines = [{"CPU": 0.5, "GPU": 2}] * 3
    assert make(monkeypatch, *given, gpus=8)._bundles() == of_ranks + of_engines
    colocated = [*given, "engine.num_engines=1", "cluster.colocate=true"]
    assert make(monkeypatch, *colocated, gpus=8)._bundles() == [{"CPU": 1.0, "GPU": 1}] * 2
    assert make(monkeypatch, *given, with_engines=False)._bundles() == [{"CPU": 0.5}] * 2
    assert make(monkeypatch, *given, with_policy=False)._bundles() == [{"CPU": 0.5}] * 3


@pytest.mark.parametrize(
    "given, gpus, backend",
    [
        ([], 0, "shm"),
        ([], 8, "nccl"),
        (["cluster.colocate=true"], 8, "ipc"),
        (["sync.backend=shm"], 8, "shm"),
    ],
)
def test_the_backend_of_the_weight_sync(given, gpus, backend, monkeypatch):
    assert make(monkeypatch, *given, gpus=gpus)._backend == backend


def test_a_local_ray_is_started_or_a_remote_one_joined(monkeypatch):
    """cluster.object_store_mb, cluster.address."""
    calls = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.ray, "init", lambda **given: calls.append(given))
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "check_address", lambda address: None)
    for given in (["cluster.object_store_mb=300"], ["cluster.address=10.0.0.1:6379"]):
        one = make(monkeypatch, *given)
        one._connect()
        one._exits.close()
    assert calls[0]["address"] == "local" and calls[0]["object_store_memory"] == 300 << 20
    assert calls[1]["address"] == "10.0.0.1:6379" and "object_store_memory" not in calls[1]


def test_a_busy_cluster_is_an_error_after_timeout_s(monkeypatch):
    waited = []
    group = SimpleNamespace(wait=lambda seconds: waited.append(seconds))
    monkeypatch.setattr(cluster, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(cluster, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}])
    monkeypatch.setattr(cluster.ray, "available_resources", lambda: {"CPU": 0.0})
    one = make(monkeypatch, "cluster.timeout_s=33")
    with pytest.raises(ClusterError, match="free after cluster.timeout_s = 33"):
        one._reserve()
    assert waited == [33]


@pytest.mark.parametrize("finish_calls", [True, False])
def test_a_weight_sync_pauses_calls_or_waits_for_them(finish_calls, monkeypatch):
    """async.finish_calls"""
    happened = []
    one = make(monkeypatch, f"async.finish_calls={finish_calls}")
    one._engines = SimpleNamespace(
        pause=lambda finish: happened.append(f"pause {finish}"),
        sleep=lambda: happened.append("sleep"),
        wake=lambda what: happened.append(f"wake {what}"),
        resume=lambda: happened.append("resume"),
        ready=lambda: ["engine"],
        serve=lambda engines: happened.append(f"serve {engines}"),
    )
    one._policy = SimpleNamespace(
        sync_weights=lambda engines: happened.append(f"sync to {engines}") or 12
    )
    assert one.sync() == 12
    assert happened == [
        f"pause {finish_calls}",
        "sleep",
        "wake weights",
        "sync to ['engine']",
        "wake kv_cache",
        "resume",
        "serve ['engine']",
    ]


class Actor:
    """An engine that records its calls."""

    def __init__(self, calls: list[str]):
        self.calls = calls

    def __getattr__(self, method):
        async def call(*arguments):
            self.calls.append(" ".join([method, *arguments]))

        return SimpleNamespace(remote=call)


def test_a_new_engine_has_no_kv_cache_during_its_weight_sync(monkeypatch):
    """Colocated, the first sync and that of a restarted engine need the memory, as later ones."""
    calls: list[str] = []
    made = make(monkeypatch, "cluster.colocate=true", gpus=8)
    made._engines = Fleet(lambda index: Actor(calls), made.config.engine)
    made._policy = SimpleNamespace(sync_weights=lambda handles: calls.append("sync"))
    monkeypatch.setattr("ray.kill", lambda handle: None)
    sync = ["sleep", "wake weights", "sync", "wake kv_cache"]
    try:
        made._open_engines()
        assert calls[:5] == ["start", *sync]
        assert made.engines.serving() == [slot.handle for slot in made.engines.slots]
        calls.clear()
        made._sync_one(Actor(calls), lambda: calls.append("serve"))
        assert [call for call in calls if call != "check"] == [*sync, "serve"]
    finally:
        made.engines.close()


@pytest.mark.parametrize("moved", [None, "2"])
def test_x18_new_ranks_replace_those_of_a_lost_policy(moved, monkeypatch):
    """Engines stay, but for a colocated one whose GPU is another rank's now."""
    happened = []

    class Ranks:
        """Of a policy on two GPUs of a node; after the restart the second may be another one."""

        def __init__(self, actors, timeout_s=None):
            happened.append(f"new ranks {actors} in {timeout_s}")
            self.gpus = ["0", moved or "1" if timeout_s else "1"]

        def engine_place(self, engine, tensor_parallel):
            return engine, (self.gpus[engine],)

        def __getattr__(self, method):
            return lambda *_: happened.append(method)

    one = make(
        monkeypatch,
        "cluster.colocate=true",
        "cluster.timeout_s=7",
        "policy.ranks=2",
        "engine.num_engines=2",
        gpus=8,
    )
    one._engines = SimpleNamespace(
        abandon_sync=lambda: happened.append("abandon"),
        sleep=lambda: happened.append("sleep"),
        metrics=dict,
        slots=[SimpleNamespace(handle=f"engine {index}") for index in range(2)],
    )
    monkeypatch.setattr(cluster, "Policy", Ranks)
    monkeypatch.setattr(one, "_actor", lambda kind, bundle, *_: f"rank {bundle}")
    monkeypatch.setattr(cluster.ray, "kill", lambda actor: happened.append(f"kill {actor}"))
    one._spawn_ranks()
    happened.clear()
    one.restart_policy()
    assert happened == [
        "kill rank 0",
        "kill rank 1",
        "abandon",
        "sleep",
        "new ranks ['rank 0', 'rank 1'] in 7",
        "start",
        "offload",
        *(["kill engine 1"] if moved else []),
    ]
    assert one.metrics() == {"policy/restarts": 1}


@pytest.mark.parametrize(
    ("given", "variable", "threads"),
    [
        (["cluster.threads_per_process=3"], "5", 3),
        ([], "5", 5),
        ([], None, 4),  # 8 cores for 2 ranks, which alternate with the engine
        (["async.max_staleness=1"], None, 2),  # 2 ranks and 1 engine at once
        (["policy.ranks=16"], None, 1),
    ],
)
def test_threads_of_ranks(monkeypatch, given, variable, threads):
    """cluster.threads_per_process, OMP_NUM_THREADS, or a share of the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    settings = ["cluster.threads_per_process=null", "policy.ranks=2", *given]
    made = make(monkeypatch, *settings)
    started: list[tuple] = []

    def start(kind, bundle, gpus, *arguments):
        started.append(arguments)
        raise InterruptedError

    monkeypatch.setattr(made, "_actor", start)
    with pytest.raises(InterruptedError):
        made._spawn()
    assert started[0][1] == threads


@pytest.mark.parametrize(("tensor_parallel", "threads"), [(1, 4), (2, 2)])
def test_threads_of_engines(monkeypatch, tensor_parallel, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = [
        "cluster.threads_per_process=null",
        "engine.num_engines=2",
        f"engine.tensor_parallel={tensor_parallel}",
    ]
    made = make(monkeypatch, *given, with_policy=False)
    monkeypatch.setattr(made, "_actor", lambda kind, bundle, gpus, config, setup: setup)
    assert made._spawn_engine(0).threads == threads


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), (None, 8)]
)
def test_cores_of_a_container(monkeypatch, tmp_path, limit, cores):
    monkeypatch.setattr(cluster.os, "sched_getaffinity", lambda process: set(range(8)))
    path = tmp_path / "cpu.max"
    if limit is not None:
        path.write_text(limit + "\n")
    assert cluster.available_cores(path) == cores


def test_a_head_without_cpus_does_not_limit_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = make(monkeypatch, "cluster.threads_per_process=null")
    nodes = [{"Alive": True, "Resources": {}}, {"Alive": True, "Resources": {"CPU": 8.0}}]
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    assert made._threads(2) == 4


@pytest.fixture
def rank(monkeypatch, tmp_path):
    from megastep.policy import actor

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actor, "forks_end_with_us", lambda: None)
    monkeypatch.setattr(actor.ray, "get_gpu_ids", lambda: [])
    monkeypatch.setattr(actor.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return actor.PolicyRank(Config(), 3, str(tmp_path), log=None)


def test_a_rank_computes_with_its_threads(rank):
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_rank_0_listens_before_it_gives_its_address(rank):
    """Another process could take the port while the ranks import Megatron."""
    host, port = rank.rendezvous_address().split(":")
    socket.create_connection((host, int(port)), timeout=5).close()
