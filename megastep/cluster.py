"""Ray: one placement group for the policy's ranks and the engines.

    with Cluster(config) as cluster:
        cluster.sync()                          # weight sync: policy → every engine
        await cluster.engines.generate(...)     # rollout/generation.py
        cluster.policy.learn(micro_batches)     # policy/actor.py

    disaggregated   a bundle of 1 GPU per rank, then one of `engine.tensor_parallel` GPUs per engine
    colocated       a bundle of 1 GPU per rank; engine e uses the GPUs of `engine.tensor_parallel`
                    consecutive ranks, from rank e × tensor_parallel

Without GPUs the bundles hold CPUs. Ranks are numbered node by node and GPU by GPU, so that tensor
parallelism stays inside a node. At the end of the block the actors, the placement group and a local
Ray are gone; a Ray cluster that existed before stays.
"""

import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megastep import redaction, signals
from megastep.config import GPU_BACKENDS, Config, address_problem
from megastep.console import waiting
from megastep.errors import ClusterError
from megastep.models.architecture import read_architecture
from megastep.policy.actor import Policy, PolicyRank
from megastep.rollout.engine import Engine, Setup
from megastep.rollout.fleet import Fleet
from megastep.rollout.keeper import spawn_keeper
from megastep.rollout.pool import Pool
from megastep.rollout.worker import AgentWorker
from megastep.rollout.workers import Workers, default_workers

RAY_STARTS = 3
LOOPBACK = "127.0.0.1"
# vLLM schedules an engine's calls, rollout.concurrency the episodes of a worker.
ACTOR_CONCURRENCY = 100_000


class Cluster:
    """with_policy=False: engines with the weights of `model.path`, for evaluation and rollouts.
    with_engines=False: the policy, to train on saved rollouts.
    """

    def __init__(
        self,
        config: Config,
        *,
        with_policy: bool = True,
        with_engines: bool = True,
        log: Path | None = None,
    ):
        self.config = config
        self.log = str(log.resolve()) if log else None
        self.with_policy = with_policy
        self.with_engines = with_engines
        self._ranks: list = []  # actors of the policy
        self._policy: Policy | None = None
        self._policy_restarts = 0
        self._engines: Fleet | None = None
        self._workers: Workers | None = None
        self._exits = ExitStack()
        self._syncing = threading.Lock()  # one weight sync at a time

    def __enter__(self) -> "Cluster":
        try:
            with waiting("Ray"):
                self._connect()
                self._reserve()
            self._spawn()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._exits.close()

    @property
    def policy(self) -> Policy:
        assert self._policy is not None, "this cluster has no policy"
        return self._policy

    @property
    def engines(self) -> Fleet:
        assert self._engines is not None, "this cluster has no engines"
        return self._engines

    def pool(self, local: Pool) -> Pool:
        """The pool of agent workers, if there are any, instead of this one of the driver."""
        return local if self._workers is None else self._workers.pool(local)

    def metrics(self) -> dict[str, float]:
        workers = {} if self._workers is None else self._workers.metrics()
        restarts = {"policy/restarts": self._policy_restarts}
        return self.engines.metrics() | workers | restarts

    def restart_policy(self) -> None:
        """Replace all ranks; engines and agent workers stay.

        The new ranks have no weights yet, and what engines serve next must wait for a weight sync.
        Bundles of a lost node move to other nodes, if there is room.
        """
        self._policy_restarts += 1
        before = self._engine_places()
        self._kill_ranks()  # also ends a weight sync in another thread
        with self._syncing:
            self.engines.abandon_sync()
            self.engines.sleep()
            self._spawn_ranks(timeout_s=self.config.cluster.timeout_s)
            self._check_one_machine()
            self._start_ranks()
        for slot, old, new in zip(self.engines.slots, before, self._engine_places()):
            if new != old:
                ray.kill(slot.handle)  # the fleet restarts it in its new place

    # ------------------------------------------------------------ weights

    def to_policy(self) -> None:
        """Colocated: engines release their GPU memory to the policy until the next weight sync."""
        self.engines.sleep()
        if self.config.cluster.colocate:
            self.policy.onload()

    def sync(self) -> int:
        """Weight sync to every engine; returns the weight version.

        Calls in flight are paused, or finish first (async.finish_calls).
        """
        with self._syncing:
            self._offload_policy()
            self.engines.pause(self.config.asynchronous.finish_calls)
            self.engines.sleep()  # for engines that restarted since `to_policy`
            self.engines.wake("weights")
            engines = self.engines.ready()
            version = self.policy.sync_weights(engines)
            self.engines.wake("kv_cache")
            self.engines.resume()
            self.engines.serve(engines)
        return version

    def _offload_policy(self) -> None:
        if self.config.cluster.colocate:
            self.policy.offload()

    def _sync_one(self, handle: Any, serve: Callable[[], None]) -> None:
        """Weight sync to one restarted engine, which serves before the next sync."""
        with self._syncing:
            self._first_sync([handle])
            serve()

    def _first_sync(self, handles: list) -> None:
        """Weight sync to engines that do not serve yet.

        A new engine has its KV cache. Colocated, it sleeps first, as before any other sync: the
        policy's buffers and vLLM's copies of a layer need the memory.
        """
        self.engines.call(handles, "sleep")
        self.engines.call(handles, "wake", "weights")
        self.policy.sync_weights(handles)
        self.engines.call(handles, "wake", "kv_cache")

    # ------------------------------------------------------------ Ray

    def _connect(self) -> None:
        settings = self.config.cluster
        address = settings.address or os.environ.get("RAY_ADDRESS")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        signals.has_started()
        if address:
            check_address(address)
            self._exits.callback(ray.shutdown)
            with signals.postponed(), signals_preserved():
                ray.init(address=address, **quiet)
            return
        # Socket paths in this folder must be short. Ray's default folder is world-writable.
        folder = tempfile.mkdtemp(prefix="megastep-", dir="/tmp")
        self._exits.callback(shutil.rmtree, folder, ignore_errors=True)
        self._exits.enter_context(loopback_only(folder))
        self._exits.callback(ray.shutdown)
        with signals.postponed(), signals_preserved():
            start_ray(
                num_cpus=available_cores(),
                object_store_memory=settings.object_store_mb << 20,
                include_dashboard=False,
                _temp_dir=f"{folder}/r",
                _node_ip_address=LOOPBACK,
                **quiet,
            )

    def _reserve(self) -> None:
        if self._backend in GPU_BACKENDS and not self.has_gpu:
            raise ClusterError(
                f"sync.backend = {self._backend}: the cluster has no GPU; use shm, or auto"
            )
        bundles = self._bundles()
        check_capacity(bundles, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        self._group = placement_group(bundles, strategy="PACK")
        self._exits.callback(remove_placement_group, self._group)
        timeout = self.config.cluster.timeout_s
        if not self._group.wait(timeout):
            raise ClusterError(
                f"the cluster is busy: {_add_up(bundles)} asked for, of "
                f"{_add_up([ray.cluster_resources()])} only {_add_up([ray.available_resources()])} "
                f"free after cluster.timeout_s = {timeout}"
            )
        self._check_one_machine()

    def _check_one_machine(self) -> None:
        if self.with_policy and self.with_engines and self._backend == "shm":
            check_one_machine(
                placement_group_table(self._group)["bundles_to_node_id"].values(), ray.nodes()
            )

    @property
    def has_gpu(self) -> bool:
        return ray.cluster_resources().get("GPU", 0) > 0

    @property
    def _backend(self) -> str:
        return self.config.sync.backend_for(self.has_gpu, self.config.cluster.colocate)

    def _bundles(self) -> list[dict[str, float]]:
        """Bundles of the ranks, then of the engines."""
        engine = self.config.engine
        cpus = self.config.cluster.cpus_per_process
        colocated = self.with_policy and self.config.cluster.colocate

        def bundle(gpus: int, processes: int) -> dict[str, float]:
            return {"CPU": cpus * processes} | ({"GPU": gpus} if self.has_gpu else {})

        bundles = []
        if self.with_policy:
            bundles += [bundle(1, 2 if colocated else 1)] * self.config.policy.ranks
        if self.with_engines and not colocated:
            bundles += [bundle(engine.tensor_parallel, 1)] * engine.num_engines
        return bundles

    # ------------------------------------------------------------ processes

    def _spawn(self) -> None:
        config = self.config
        if self.with_policy:
            self._exits.callback(self._kill_ranks)
            self._spawn_ranks()
        if self.with_engines:
            on_restart = self._sync_one if self.with_policy else None
            self._engines = Fleet(self._spawn_engine, config.engine, on_restart, self.log)
            self._exits.callback(self._engines.close)
            self._spawn_workers(self._engines)
        if self.with_policy:
            self._start_ranks()
        if self.with_engines:
            self._open_engines()

    def _spawn_ranks(self, timeout_s: float | None = None) -> None:
        config = self.config
        threads = self._threads(config.policy.ranks)
        self._ranks = [
            self._actor(PolicyRank, rank, 1, config, threads, os.getcwd(), self.log)
            for rank in range(config.policy.ranks)
        ]
        self._policy = Policy(self._ranks, timeout_s)

    def _start_ranks(self) -> None:
        with waiting("policy ranks"):
            self.policy.start(self._backend)
        if self.with_engines:
            self._offload_policy()  # a starting engine measures the free GPU memory

    def _kill_ranks(self) -> None:
        for actor in self._ranks:
            ray.kill(actor)

    def _open_engines(self) -> None:
        with waiting("engines"):
            self.engines.start()
            if self.with_policy:
                with self._syncing:
                    self._first_sync([slot.handle for slot in self.engines.slots])
            self.engines.open()
        if self._workers is not None:
            with waiting("agent workers"):
                self._workers.start()

    def _spawn_workers(self, fleet: Fleet) -> None:
        count = self.config.rollout.workers
        if count is None:
            cpus = sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
            spare_cpus = cpus - sum(bundle["CPU"] for bundle in self._bundles())
            count = default_workers(self.config.rollout.concurrency, self.has_gpu, spare_cpus)
        if count and (self.config.env.name is not None or self.config.has_agent):
            has_experts = read_architecture(self.config.model.path).experts is not None
            keeper = partial(spawn_keeper, self.config) if has_experts else None
            self._workers = Workers(self._spawn_worker, count, fleet, keeper)
            self._exits.callback(self._workers.close)

    def _spawn_worker(self, index: int):
        # Without CPUs of their own they start wherever there is room; SPREAD: on all nodes.
        actor = ray.remote(AgentWorker).options(
            num_cpus=0, scheduling_strategy="SPREAD", max_concurrency=ACTOR_CONCURRENCY
        )
        environment = redaction.variables(self.config.env.options)
        environment |= {name: os.environ[name] for name in self.config.agent.environment}
        return actor.remote(self.config, index, os.getcwd(), sys.path, environment, self.log)

    def _spawn_engine(self, index: int):
        config = self.config
        tensor_parallel = config.engine.tensor_parallel
        colocated = self.with_policy and config.cluster.colocate
        if self.with_policy:
            self.policy.check()  # else the engine would wait for weights forever
        if colocated:
            bundle, gpu_ids = self.policy.engine_place(index, tensor_parallel)
        else:
            bundle = index + (config.policy.ranks if self.with_policy else 0)
            gpu_ids = None
        setup = Setup(
            index=index,
            backend=self._backend,
            has_gpu=self.has_gpu,
            gpu_ids=gpu_ids,
            own_weights=not self.with_policy,
            threads=self._threads(self._engine_workers),
            folder=os.getcwd(),
            log=self.log,
        )
        return self._actor(Engine, bundle, 0 if colocated else tensor_parallel, config, setup)

    def _engine_places(self) -> list[tuple[int, tuple[str, ...]]]:
        """Of colocated engines: bundle and GPUs, which follow the ranks."""
        if not self.config.cluster.colocate:
            return []
        engine = self.config.engine
        indices = range(engine.num_engines)
        return [self.policy.engine_place(index, engine.tensor_parallel) for index in indices]

    def _threads(self, processes: int) -> int:
        """Threads of each of so many ranks or workers of engines, if they compute on the CPU.

        Synchronous training alternates between ranks and engines: either has all cores.
        """
        given = given_threads(self.config)
        if given is not None:
            return given
        is_asynchronous = self.config.asynchronous.max_staleness > 0
        if self.with_policy and self.with_engines and is_asynchronous:
            processes = self.config.policy.ranks + self._engine_workers
        # The placement group prefers one node.
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cores = min(of_node["CPU"] for of_node in resources if "CPU" in of_node)
        return max(1, int(cores) // processes)

    @property
    def _engine_workers(self) -> int:
        return self.config.engine.num_engines * self.config.engine.tensor_parallel

    def _actor(self, kind: type, bundle: int, gpus: int, *arguments):
        options: dict[str, Any] = {
            "num_cpus": self.config.cluster.cpus_per_process,
            "num_gpus": gpus if self.has_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }
        if kind is Engine:
            options["max_concurrency"] = ACTOR_CONCURRENCY
        return ray.remote(kind).options(**options).remote(*arguments)


# ---------------------------------------------------------------- cores


def given_threads(config: Config) -> int | None:
    """Threads of a process that computes on the CPU, by the config or by OMP_NUM_THREADS."""
    if config.cluster.threads_per_process is not None:
        return config.cluster.threads_per_process
    variable = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(variable)) if variable.isdigit() else None


def available_cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Of this machine, or of its container: `limit` has the microseconds of each period, or max."""
    cores = len(os.sched_getaffinity(0))
    if limit.is_file():
        quota, period = limit.read_text().split()
        if quota.isdigit():
            return max(1, min(cores, int(quota) // int(period)))
    return cores


# ---------------------------------------------------------------- starting Ray


@contextmanager
def signals_preserved() -> Iterator[None]:
    """Keep our SIGTERM handler while Ray starts.

    Ray's Python half replaces it and exits silently; its C++ half replaces it without Python's
    knowledge and aborts. So the first is disabled, and after the second ours is installed again.
    """
    set_handler = ray_utils.set_sigterm_handler
    listens = signals.is_listening()
    if listens:
        ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = set_handler
        if listens:
            signals.listen()


@contextmanager
def loopback_only(folder: str) -> Iterator[None]:
    """The environment of a local Ray: its processes listen on the loopback interface only, and
    clients need a token made for this run.
    """
    token = Path(folder) / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    given = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_AUTH_TOKEN": None,
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": LOOPBACK,
    }
    before = {name: os.environ.get(name) for name in given}
    _set_environment(given)
    # services.resolve_ip_for_localhost replaces 127.0.0.1 if a Ray cluster is enabled.
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    RayConfig.initialize("")  # Ray caches the environment
    AuthenticationTokenLoader.instance().reset_cache()


def start_ray(**given) -> None:
    """Start a local Ray; retries, since a busy machine may need more than Ray's 30 s."""
    others = set(psutil.Process().children())
    for _ in range(RAY_STARTS):
        try:
            ray.init(address="local", **given)
            return
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            for process in set(psutil.Process().children()) - others:
                process.kill()
    raise ClusterError(
        f"Ray did not start, {RAY_STARTS} times; machine too busy, or memory or disk full"
    )


def check_address(address: str) -> None:
    """Fail early: Ray itself would retry for minutes."""
    wrong = address_problem(address)
    if wrong is not None:
        raise ClusterError(f"cluster.address or $RAY_ADDRESS = {address}: {wrong}")
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `auto`: Ray finds the address
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ClusterError(
            f"cluster.address = {address}: no Ray there ({error.strerror or error})"
        ) from None


def check_capacity(bundles: list[dict[str, float]], nodes: list[dict[str, float]]) -> None:
    """Place the bundles on empty nodes, the largest first; raises if one does not fit."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0), b["CPU"]), reverse=True):
        node = next(
            (n for n in free if all(n.get(kind, 0) >= amount for kind, amount in bundle.items())),
            None,
        )
        if node is None:
            raise ClusterError(
                f"the cluster is too small: {len(bundles)} places with {_add_up(bundles)} in all "
                f"are needed, {len(nodes)} node(s) offer "
                f"{'; '.join(_add_up([n]) for n in nodes)}; {_hint(bundles)}"
            )
        for kind, amount in bundle.items():
            node[kind] -= amount


def check_one_machine(places: Iterable[str], nodes: list[dict]) -> None:
    """places: ids of the job's nodes; a machine may have several nodes."""
    used = set(places)
    machines = sorted({node["NodeManagerHostname"] for node in nodes if node["NodeID"] in used})
    if len(machines) > 1:
        raise ClusterError(
            "sync.backend = shm, the one without GPUs, needs ranks and engines on one machine; "
            f"there is room for them on {', '.join(machines)} only"
        )


def _hint(bundles: list[dict[str, float]]) -> str:
    gpus = any("GPU" in bundle for bundle in bundles)
    return "lower policy.ranks, engine.num_engines or " + (
        "set cluster.colocate" if gpus else "cluster.cpus_per_process"
    )


def _add_up(resources: list[dict[str, float]]) -> str:
    kinds = [kind for kind in ("GPU", "CPU") if any(kind in r for r in resources)]
    return (
        " and ".join(f"{sum(r.get(kind, 0) for r in resources):g} {kind}" for kind in kinds)
        or "nothing"
    )
