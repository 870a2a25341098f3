"""The policy as Ray actors: one `PolicyRank` per rank, and `Policy`, which calls all of them.

    policy = Policy(actors)
    policy.start(backend)                       # process groups, model, optimizer
    updates = policy.learn(by_data_rank)        # one optimizer step per mini-batch
    version = policy.sync_weights(engines)

Every call of `Policy` is collective: it runs on all ranks and returns when all have, or raises the
first error. Without one of its ranks a policy is lost: its calls raise `PolicyLost`, whatever the
other ranks wait for, and the loop replaces all of them (trainer/loop.py).
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

from megastep.checkpoint.loop_state import LoopState
from megastep.config import Config, LossConfig, OptimizerConfig
from megastep.distributed.ports import listen
from megastep.distributed.processes import forks_end_with_us, send_output_to
from megastep.distributed.references import get_routing
from megastep.errors import ClusterError, MegastepError, PolicyLost, RoutingLost
from megastep.policy.routing_fetch import RoutingFetch
from megastep.samples.routing import routing_of_batches, tables_of
from megastep.types import MicroBatch, Update

# Ray probes a silent node five times, every three seconds, before it declares it dead.
_DEATH_KNOWN_S = 30
_CHECK_EVERY_S = 2.0


class PolicyRank:
    """One rank: an actor around `PolicyWorker` and the sender of its weights."""

    def __init__(self, config: Config, threads: int, folder: str, log: str | None):
        self.config = config
        self._listener: socket.socket | None = None
        forks_end_with_us()
        os.chdir(folder)
        if log:
            send_output_to(Path(log))
        if not ray.get_gpu_ids():
            os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported

    def where(self) -> tuple[str, list[str]]:
        """The node and the GPUs of this actor."""
        context = ray.get_runtime_context()
        return context.get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def rendezvous_address(self) -> str:
        """Rank 0 listens from here on: ranks connect seconds later, when they have Megatron."""
        host = ray.util.get_node_ip_address()
        self._listener = listen(host)
        return f"{host}:{self._listener.getsockname()[1]}"

    def start(self, rank: int, address: str, backend: str) -> "RankPlace":
        """Join the process groups and build the model."""
        from megastep.distributed import cpu

        cpu.import_megatron()
        from megastep.distributed import parallel
        from megastep.policy.worker import PolicyWorker
        from megastep.sync.sender import Sender

        config = self.config
        listener = self._listener
        self._listener = None  # torch owns it from here on
        parallel.start(config.policy.parallel, rank, config.policy.ranks, address, listener)
        self.worker = PolicyWorker(config)
        self.sender = Sender(self.worker.chunks, self.worker.arch, config, backend)
        place = parallel.place()
        self.place = RankPlace(place.data, place.pipeline)
        return self.place

    def learn(self, mini_batches: list[list[MicroBatch]], references: list) -> list[Update]:
        """references: to the routing of this stage, see RoutingFetch."""
        stage = self.place.stage
        layers = self.worker.replayed_layers
        routing = RoutingFetch(mini_batches, references, stage, layers, get_routing)
        return self.worker.learn(mini_batches, routing.one_ahead)

    def call(self, method: str, *arguments) -> Any:
        return getattr(self.worker, method)(*arguments)

    def sync_weights(self, engines: list) -> int:
        self.sender.send(engines, self.worker.step)
        return self.worker.step


class RankPlace(NamedTuple):
    """The part of the data, and of the model's layers, that a rank has."""

    data: int
    stage: int


class Policy:
    """All ranks of the policy."""

    def __init__(self, actors: list, timeout_s: float | None = None):
        """Actor i is in bundle i; ranks are numbered by node and GPU.

        timeout_s: for actors to get their places; without a node they wait for another one.
        """
        self._submitting = threading.Lock()
        self._checking = threading.Lock()
        self._checked_s = 0.0
        self._lost: PolicyLost | None = None
        self.ranks = actors
        places = [actor.where.remote() for actor in actors]
        with self._deaths():
            try:
                self._where = ray.get(places, timeout=timeout_s)
            except GetTimeoutError:
                raise PolicyLost(
                    f"there is no room for {len(actors)} new policy rank(s) after "
                    f"cluster.timeout_s = {timeout_s}"
                ) from None
        self._order = node_by_node(self._where)
        self.ranks = [actors[bundle] for bundle in self._order]
        self._pings = [actor.where.remote() for actor in self.ranks]

    def start(self, backend: str) -> None:
        with self._deaths():
            address = ray.get(self.ranks[0].rendezvous_address.remote())
        calls = [
            actor.start.remote(rank, address, backend) for rank, actor in enumerate(self.ranks)
        ]
        self.places: list[RankPlace] = self._results(calls)

    def check(self) -> None:
        """Raise PolicyLost if a rank has died; does not wait for calls in progress."""
        with self._checking:
            if self._lost is not None:
                raise self._lost
            if time.monotonic() - self._checked_s < _CHECK_EVERY_S:
                return
            self._checked_s = time.monotonic()
            answered, asked = ray.wait(self._pings, num_returns=len(self._pings), timeout=0)
            with self._deaths():
                ray.get(answered)
            if not asked:
                self._pings = [actor.where.remote() for actor in self.ranks]

    # ------------------------------------------------------------ training

    def begin(self, optimizer: OptimizerConfig, loss: LossConfig, optimizer_steps: int) -> None:
        """Begin a stage of training: see PolicyWorker.begin."""
        self._call("begin", optimizer, loss, optimizer_steps)

    def learn(self, by_data_rank: list[list[list[MicroBatch]]]) -> list[Update]:
        """One optimizer step per mini-batch; by_data_rank[rank][mini-batch] are micro-batches."""
        parts = [ray.put(part) for part in by_data_rank]
        tables = [
            tables_of(rows for batch in part for rows in routing_of_batches(batch))
            for part in by_data_rank
        ]

        def submit(actor, place: RankPlace):
            references = [table.references[place.stage] for table in tables[place.data]]
            return actor.learn.remote(parts[place.data], references)

        return self._on_all(submit)[0]

    def sync_weights(self, engines: list) -> int:
        """Send the weights to these engine actors; returns the weight version."""
        return self._on_all(lambda actor, _: actor.sync_weights.remote(engines))[0]

    # ------------------------------------------------------------ memory and checkpoints

    def offload(self) -> None:
        """Free the GPU memory that colocated engines need."""
        self._call("offload")

    def onload(self) -> None:
        self._call("onload")

    def save(self, root: Path, state: LoopState) -> None:
        self._call("save", root, state)

    def seal_written(self) -> None:
        """Publish a background checkpoint whose files are complete; does not wait for one."""
        self._call("seal_written")

    def finish_saving(self) -> None:
        self._call("finish_saving")

    def load(self, checkpoint: Path) -> None:
        self._call("load", checkpoint)

    # ------------------------------------------------------------ calls

    def _call(self, method: str, *arguments) -> list:
        """`PolicyWorker.method` on every rank; arguments travel once per node."""
        shared = [ray.put(argument) for argument in arguments]
        return self._on_all(lambda actor, _: actor.call.remote(method, *shared))

    def _on_all(self, submit: Callable[[Any, RankPlace], Any]) -> list:
        """Results of all ranks.

        Another thread sends weights to restarted engines. Calls are collective, so every rank must
        receive the calls of both threads in one order.
        """
        with self._submitting:
            calls = [submit(actor, place) for actor, place in zip(self.ranks, self.places)]
        return self._results(calls)

    def _results(self, calls: list) -> list:
        with self._deaths():
            try:
                return ray.get(calls)  # raises the first error, even if other calls never end
            except RayTaskError as error:
                if isinstance(error.cause, RoutingLost):
                    raise error.cause from None
                if not isinstance(error.cause, MegastepError):
                    raise_death(calls)
                raise

    @contextmanager
    def _deaths(self) -> Iterator[None]:
        """Raise PolicyLost where Ray reports that an actor ended. An error in its constructor is
        one of its code: it would be raised again.
        """
        try:
            yield
        except RayTaskError:
            raise  # of the rank's code; it may also be an instance of its cause
        except OutOfMemoryError as error:
            first_line = str(error).splitlines()[0]
            self._lost = PolicyLost(
                f"Ray killed a policy rank because memory ran out: {first_line}"
            )
            raise self._lost from None
        except RayActorError as error:
            if error.actor_init_failed:
                raise
            ranks = [r for r, actor in enumerate(self.ranks) if _id(actor) == error.actor_id]
            self._lost = PolicyLost(f"policy rank {', '.join(map(str, ranks)) or '?'} died")
            raise self._lost from None

    # ------------------------------------------------------------ placement

    def engine_place(self, engine: int, tensor_parallel: int) -> tuple[int, tuple[str, ...]]:
        """Bundle and GPUs of a colocated engine: those of `tensor_parallel` consecutive ranks."""
        bundles = self._order[engine * tensor_parallel : (engine + 1) * tensor_parallel]
        if len({self._where[bundle][0] for bundle in bundles}) > 1:
            raise ClusterError(
                f"engine.tensor_parallel = {tensor_parallel}: the GPUs of engine {engine} are on "
                "several nodes"
            )
        return bundles[0], tuple(gpu for bundle in bundles for gpu in self._where[bundle][1])


def raise_death(calls: list) -> None:
    """Raise Ray's error if a rank has died.

    Its peers fail in collective calls some seconds before Ray reports the cause, or never return.
    """
    deadline_s = time.monotonic() + _DEATH_KNOWN_S
    while calls:
        ended, calls = ray.wait(calls, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ended:
            return
        with suppress(RayTaskError):
            ray.get(ended)


def _id(actor: Any) -> str:
    return actor._actor_id.hex()


def node_by_node(where: list[tuple[str, list[str]]]) -> list[int]:
    """Bundles ordered by node, then by GPU; GPU ids are numbers, or names of GPU instances."""

    def key(bundle: int):
        node, gpus = where[bundle]
        return node, [(len(gpu), gpu) for gpu in gpus], bundle

    return sorted(range(len(where)), key=key)
