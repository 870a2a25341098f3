"""Ray: one placement group for the policy's ranks and the engines, and everything that runs in it.

    with Cluster(config) as cluster:
        cluster.sync()                                  # the policy's weights into every engine
        await cluster.engines.generate(...)             # see rollout/generation.py
        updates = cluster.policy.scatter("update", micro_batches)

    apart       bundles of 1 GPU for each rank, then bundles of `engine.tensor_parallel` GPUs for each engine
    colocated   bundles of 1 GPU for each rank; engine e lives on those of ranks e·tensor ... e·tensor + tensor - 1

Without GPUs in the cluster the bundles hold CPUs, as Ray counts them. Ranks are numbered node by node and GPU by GPU,
so that tensor parallelism stays inside a node.

The block ends with everything gone: actors, placement group, and the Ray that was started for it. What is not ours
is never touched; a cluster that was there before stays.
"""

import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._raylet import AuthenticationTokenLoader
from ray._raylet import Config as RayConfig
from ray.exceptions import RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megastep import signals
from megastep.config import GPU_BACKENDS, Config, address_problem
from megastep.console import waiting
from megastep.distributed.ports import free_port
from megastep.distributed.processes import forks_end_with_us, send_output_to
from megastep.errors import CheckpointError, ClusterError, TrainingError
from megastep.rollout.engine import Engine, Setup
from megastep.rollout.fleet import Fleet

RAY_STARTS = 3
LOOPBACK = "127.0.0.1"
_DEATH_KNOWN_S = (
    30  # Ray asks a silent node five times, every three seconds, before it calls it dead
)


class Cluster:
    """`with_policy=False`: engines alone, with the weights of `model.path`, for evaluation and rollouts;
    `with_engines=False`: the policy alone, to train on what was played before."""

    def __init__(
        self,
        config: Config,
        *,
        with_policy: bool = True,
        with_engines: bool = True,
        log: Path | None = None,
    ):
        self.config, self.log = config, str(log.resolve()) if log else None
        self.with_policy, self.with_engines = with_policy, with_engines
        self.policy: Policy | None = None
        self.engines: Fleet | None = None
        self._exits = ExitStack()  # what undoes each thing that was begun, the last first
        self._syncing = threading.Lock()  # the policy sends to one set of engines at a time

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

    # ------------------------------------------------------------ weights

    def to_policy(self) -> None:
        """Where engines and ranks share their places: the memory of both is the policy's until the next push."""
        self.engines.sleep()
        if self.config.cluster.colocate:
            self.policy.call("wake")

    def sync(self) -> int:
        """Push the policy's weights to every engine; returns their version. Calls in flight are frozen meanwhile, or
        have ended before (async.finish_calls)."""
        with self._syncing:
            self._rest()
            self.engines.pause(self.config.asynchronous.finish_calls)
            self.engines.wake("weights")
            version = self.policy.sync_weights(self.engines.serving())
            self.engines.wake("kv_cache")
            self.engines.resume()
        return version

    def _rest(self) -> None:
        if self.config.cluster.colocate:
            self.policy.call("rest")

    def _refresh(self, handle: Any, serve: Callable[[], None]) -> None:
        """The same for one engine that does not serve yet, and does before the next push."""
        with self._syncing:
            self.policy.sync_weights([handle])
            serve()

    # ------------------------------------------------------------ Ray

    def _connect(self) -> None:
        settings = self.config.cluster
        address = settings.address or os.environ.get("RAY_ADDRESS")
        quiet = dict(log_to_driver=False, logging_level="ERROR")
        signals.has_started()
        if address:
            check_address(address)
            self._exits.callback(ray.shutdown)
            with signals.postponed(), signals_left_alone():
                ray.init(address=address, **quiet)
            return
        # Ray's sockets live below this folder, and their paths must be short. Ray lets everybody write to its own.
        folder = tempfile.mkdtemp(prefix="megastep-", dir="/tmp")
        self._exits.callback(shutil.rmtree, folder, ignore_errors=True)
        self._exits.enter_context(on_this_machine_alone(folder))
        self._exits.callback(ray.shutdown)
        with signals.postponed(), signals_left_alone():
            start_ray(
                num_cpus=len(os.sched_getaffinity(0)),
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
                f"the cluster is busy: {_add_up(bundles)} asked for, of {_add_up([ray.cluster_resources()])} only "
                f"{_add_up([ray.available_resources()])} free after cluster.timeout_s = {timeout}"
            )
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
        """Those of the ranks first."""
        engine, cpus = self.config.engine, self.config.cluster.cpus_per_process
        ranks = self.config.policy.ranks if self.with_policy else 0
        own_places = not (self.with_policy and self.config.cluster.colocate)

        def bundle(gpus: int, processes: int) -> dict[str, float]:
            return {"CPU": cpus * processes} | ({"GPU": gpus} if self.has_gpu else {})

        of_ranks = [bundle(1, 1 if own_places else 2)] * ranks
        return of_ranks + (
            [bundle(engine.tensor_parallel, 1)] * engine.num_engines
            if own_places and self.with_engines
            else []
        )

    # ------------------------------------------------------------ processes

    def _spawn(self) -> None:
        config = self.config
        if self.with_policy:
            actors = [
                self._actor(PolicyRank, rank, 1, config, os.getcwd(), self.log)
                for rank in range(config.policy.ranks)
            ]
            self._exits.callback(_kill, actors)
            self.policy = Policy(actors)
        if self.with_engines:
            refresh = self._refresh if self.with_policy else None
            self.engines = Fleet(self._spawn_engine, config.engine, refresh, self.log)
            self._exits.callback(self.engines.close)
        if self.with_policy:
            with waiting("policy ranks"):
                self.policy.start(self._backend)
            if self.with_engines:
                self._rest()  # an engine wants to see its share of the memory free
        if self.with_engines:
            self._open_engines()

    def _open_engines(self) -> None:
        with waiting("engines"):
            self.engines.start()
            if self.with_policy:
                self._first_sync()
            self.engines.open()

    def _first_sync(self) -> None:
        with self._syncing:
            self.policy.sync_weights([slot.handle for slot in self.engines.slots])

    def _spawn_engine(self, index: int):
        config = self.config
        if self.with_policy:
            self.policy.check_nodes_alive()  # without its ranks an engine would wait for weights that never come
        shares = self.with_policy and config.cluster.colocate
        bundle, gpu_ids = (
            self.policy.share(index, config.engine.tensor_parallel)
            if shares
            else (index + (config.policy.ranks if self.with_policy else 0), None)
        )
        setup = Setup(
            index=index,
            backend=self._backend,
            has_gpu=self.has_gpu,
            gpu_ids=gpu_ids,
            own_weights=not self.with_policy,
            folder=os.getcwd(),
            log=self.log,
        )
        return self._actor(
            Engine, bundle, 0 if shares else config.engine.tensor_parallel, config, setup
        )

    def _actor(self, kind: type, bundle: int, gpus: int, *arguments):
        options = dict(
            num_cpus=self.config.cluster.cpus_per_process,
            num_gpus=gpus if self.has_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        )
        if kind is Engine:
            options["max_concurrency"] = (
                100_000  # vLLM decides how many calls run, the others wait in its queue
            )
        return ray.remote(kind).options(**options).remote(*arguments)


# ---------------------------------------------------------------- room


@contextmanager
def signals_left_alone() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it starts, and would exit without a word. Its C++ half does so too, behind the
    back of Python's signal module, and would abort: afterwards the handlers are installed once more."""
    take = ray_utils.set_sigterm_handler
    listens = signals.is_listening()
    if listens:
        ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = take
        if listens:
            signals.listen()


@contextmanager
def on_this_machine_alone(folder: str) -> Iterator[None]:
    """The environment of a Ray of our own: it and what it starts listen on the loopback interface, and Ray answers
    only those who know a token that no other run has."""
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
    # services.resolve_ip_for_localhost makes another address of 127.0.0.1 unless Ray is for one machine only.
    several, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    RayConfig.initialize("")  # Ray keeps what it has read
    AuthenticationTokenLoader.instance().reset_cache()


def start_ray(**given) -> None:
    """One of our own. Ray gives its processes half a minute to start, which a busy machine may need more of."""
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
        f"Ray did not start, {RAY_STARTS} times; the machine is too busy, or memory or disk are full"
    )


def check_address(address: str) -> None:
    """Ray itself would try for minutes."""
    wrong = address_problem(address)
    if wrong is not None:
        raise ClusterError(f"cluster.address or $RAY_ADDRESS = {address}: {wrong}")
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `auto` and the like: Ray knows where to look
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ClusterError(
            f"cluster.address = {address}: no Ray there ({error.strerror or error})"
        ) from None


def check_capacity(bundles: list[dict[str, float]], nodes: list[dict[str, float]]) -> None:
    """Fill the nodes with the bundles, the largest first; what does not fit in an empty cluster never will."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0), b["CPU"]), reverse=True):
        node = next(
            (n for n in free if all(n.get(kind, 0) >= amount for kind, amount in bundle.items())),
            None,
        )
        if node is None:
            raise ClusterError(
                f"the cluster is too small: {len(bundles)} places with {_add_up(bundles)} in all are needed, "
                f"{len(nodes)} node(s) offer {'; '.join(_add_up([n]) for n in nodes)}; {_hint(bundles)}"
            )
        for kind, amount in bundle.items():
            node[kind] -= amount


def check_one_machine(places: Iterable[str], nodes: list[dict]) -> None:
    """`places` are ids of the nodes that the job is on, of which a machine may have several."""
    places = set(places)
    machines = sorted({node["NodeManagerHostname"] for node in nodes if node["NodeID"] in places})
    if len(machines) > 1:
        raise ClusterError(
            f"sync.backend = shm, which is what there is without GPUs: ranks and engines share memory, "
            f"so they must be on one machine; there is room for them on {', '.join(machines)} only"
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


# ---------------------------------------------------------------- the policy


class PolicyRank:
    """One rank of the policy: a thin actor around `PolicyWorker`."""

    def __init__(self, config: Config, folder: str, log: str | None):
        self.config = config
        forks_end_with_us()
        os.chdir(folder)
        if log:
            send_output_to(Path(log))
        if not ray.get_gpu_ids():
            os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ranks and engines share the cores

    def where(self) -> tuple[str, list[str]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def free_address(self) -> str:
        return f"{ray.util.get_node_ip_address()}:{free_port()}"

    def start(self, rank: int, address: str, backend: str) -> int:
        """Join the other ranks and build the model; returns the data-parallel rank."""
        from megastep.distributed import parallel
        from megastep.policy.worker import PolicyWorker
        from megastep.sync.sender import Sender

        config = self.config
        parallel.start(config.policy.parallel, rank, config.policy.ranks, address)
        self.worker = PolicyWorker(config)
        self.sender = Sender(self.worker.chunks, self.worker.arch, config, backend)
        return parallel.place().data

    def call(self, method: str, *arguments, **named) -> Any:
        return getattr(self.worker, method)(*arguments, **named)

    def sync_weights(self, engines: list) -> int:
        self.sender.send(engines, self.worker.step)
        return self.worker.step


class Policy:
    """All ranks. Its methods call every rank and wait for all; the first error ends the wait."""

    def __init__(self, actors: list):
        """Actor i is in bundle i; ranks are given out by node and GPU."""
        self._submitting = threading.Lock()
        self._where = ray.get([actor.where.remote() for actor in actors])
        self._order = node_by_node(self._where)
        self.ranks = [actors[bundle] for bundle in self._order]

    def start(self, backend: str) -> None:
        address = ray.get(self.ranks[0].free_address.remote())
        self.data_ranks = ray.get(
            [actor.start.remote(rank, address, backend) for rank, actor in enumerate(self.ranks)]
        )

    def call(self, method: str, *arguments, **named) -> list:
        """`PolicyWorker.method` on every rank with the same arguments, which travel once per node."""
        shared = [ray.put(argument) for argument in arguments]
        return self._collect(lambda actor, _: actor.call.remote(method, *shared, **named))

    def scatter(self, method: str, by_data_rank: list) -> list:
        """`PolicyWorker.method` on every rank with the part of its data-parallel rank, which travels once per node."""
        parts = [ray.put(part) for part in by_data_rank]
        return self._collect(lambda actor, data_rank: actor.call.remote(method, parts[data_rank]))

    def sync_weights(self, engines: list) -> int:
        """Weights to these engines' actors; returns the version: the optimizer steps behind them."""
        return self._collect(lambda actor, _: actor.sync_weights.remote(engines))[0]

    def _collect(self, submit: Callable[[Any, int], Any]) -> list:
        """Results of a call of every rank. A restarted engine is sent weights by another thread, and all ranks must see
        both threads' calls in one order: they are collective."""
        with self._submitting:
            calls = [
                submit(actor, data_rank) for actor, data_rank in zip(self.ranks, self.data_ranks)
            ]
        try:
            return ray.get(calls)
        except RayTaskError as error:
            if not isinstance(error.cause, (CheckpointError, TrainingError)):
                raise_death(calls)
            raise

    def share(self, engine: int, tensor: int) -> tuple[int, tuple[str, ...]]:
        """Where an engine lives on the places of ranks: a bundle, and the GPUs of as many ranks as it needs."""
        bundles = self._order[engine * tensor : (engine + 1) * tensor]
        if len({self._where[bundle][0] for bundle in bundles}) > 1:
            raise ClusterError(
                f"engine.tensor_parallel = {tensor}: the GPUs of engine {engine} lie on several nodes"
            )
        return bundles[0], tuple(gpu for bundle in bundles for gpu in self._where[bundle][1])

    def check_nodes_alive(self) -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        lost = [
            rank for rank, bundle in enumerate(self._order) if self._where[bundle][0] not in alive
        ]
        if lost:
            raise ClusterError(
                f"the node of the policy's rank(s) {', '.join(map(str, lost))} is lost"
            )


def raise_death(calls: list) -> None:
    """Of a rank, if one has died. Its peers fail in their collective calls some seconds before Ray knows the cause."""
    ended, _ = ray.wait(calls, num_returns=len(calls), timeout=_DEATH_KNOWN_S)
    for call in ended:
        with suppress(RayTaskError):
            ray.get(call)


def node_by_node(where: list[tuple[str, list[str]]]) -> list[int]:
    """Places in the order of their nodes, and on a node of their GPUs, which are numbers or, as parts, names."""

    def key(place: int):
        node, gpus = where[place]
        return node, [(len(gpu), gpu) for gpu in gpus], place

    return sorted(range(len(where)), key=key)


def _kill(actors: list) -> None:
    for actor in actors:
        ray.kill(actor)
