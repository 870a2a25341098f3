"""Weight sync: the policy's weights, under any parallel layout, into every engine, without disk.

    shm    one node, no GPU needed. Every rank copies its shards into place in a segment of shared
           memory, nothing is gathered; engines load one half while the ranks fill the other.
    nccl   disaggregated engines: rank 0 broadcasts to all of them        } vLLM's senders, fed by
    ipc    colocated engines: each rank hands over its GPU's memory       } `gather_hf`; not run on
                                                                          } a GPU yet
On every policy rank:

    sender = Sender(worker.chunks, worker.arch, config, backend="shm")
    for batches in rollouts:
        worker.update(batches)                          # optimizer step `worker.step`
        # the driver has paused the engines
        sender.send(engines, version=worker.step)       # collective
        # the driver resumes them: they sample with weight version `worker.step`

The weight version is the number of optimizer steps; every engine keeps its own. Memory: two buckets
(shm), or those of `gather_hf` and vLLM's send buffers, one (ipc) or two (nccl) of a bucket each. A
tensor larger than `sync.bucket_mb` is a bucket.

An engine that dies or hangs in a weight sync is dropped, and the others receive all weights. With
nccl its death blocks their broadcasts: the group is aborted, formed again without it, and the
weights are sent again.

Engines are Ray actors with the methods that `Engines` calls.
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from torch import Tensor

from megastep.config import Config, EngineConfig
from megastep.distributed import parallel
from megastep.distributed.ports import free_port
from megastep.errors import SyncError
from megastep.models.architecture import Architecture
from megastep.sync import nccl, shm
from megastep.sync.checksum import add, checksum
from megastep.weights.mapping import ParamMapping, hf_slices
from megastep.weights.megatron import (
    Holder,
    Holders,
    buckets_of,
    find_holders,
    gather_hf,
    local_shards,
    shard_holders,
    shard_of,
)

_DIED = (RayActorError, OutOfMemoryError)  # the second: Ray killed the actor for memory
_ALIGN = 64  # bytes; vLLM packs the tensors directly from the segment


class Engines:
    """The control plane of a weight sync, on rank 0.

    An engine that dies or hangs is dropped; the sync continues with the others.
    """

    def __init__(self, handles: list, version: int, settings: EngineConfig, timeout_s: float):
        self.handles = list(handles)
        self.version = version
        self.settings = settings
        self.timeout_s = timeout_s
        self.group: nccl.Group | None = None  # aborted when an engine is lost

    def call(self, method: str, *arguments) -> list:
        return self.collect(self.submit(method, *arguments))

    def submit(self, method: str, *arguments) -> list[tuple]:
        return [(handle, getattr(handle, method).remote(*arguments)) for handle in self.handles]

    def collect(self, calls: list[tuple]) -> list:
        """Results in order of completion, without those of engines that died or are late.

        All calls share one deadline. After the abort of the group those that it blocked get the
        time of a health check to return.
        """
        waiting = {reference: handle for handle, reference in calls}
        results = []
        deadline = time.monotonic() + self.timeout_s
        while waiting:
            ended, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            died = False
            for reference in ended:
                handle = waiting.pop(reference)
                try:
                    results.append(ray.get(reference))
                except _DIED:
                    self._drop(handle)
                    died = True
                except RayTaskError as error:
                    self._fail(handle, error)
            if died or not ended:
                if self._abort_group():
                    deadline = time.monotonic() + self.settings.health_timeout_s
                elif not ended:
                    self._kill(list(waiting.values()))
                    break
        return results

    def _fail(self, handle: Any, error: RayTaskError) -> None:
        """Drop an engine that could not load, for example for lack of memory; the last one's error
        is that of the sync. In an nccl group it has left the others in the middle of a message."""
        if self.group is not None:
            self.group.error = error
            self._abort_group()
            raise error
        if self.handles == [handle]:
            raise error
        self._kill([handle])

    def _abort_group(self) -> bool:
        """False: there is none, or not any more."""
        if self.group is None or self.group.is_aborted:
            return False
        self.group.abort()
        return True

    def _kill(self, handles: list) -> None:
        """Engines that hang or failed: they must not serve with half of the weights."""
        for handle in handles:
            ray.kill(handle)
            self._drop(handle)

    def _drop(self, handle: Any) -> None:
        if handle in self.handles:
            self.handles.remove(handle)

    # Called by vLLM's senders.

    def init_weight_transfer_engine(self, info: dict) -> None:
        calls = []
        for index, handle in enumerate(self.handles):
            own_info = dict(info)
            if "rank_offset" in info:  # in the nccl group: rank 0, then engine by engine
                own_info["rank_offset"] = 1 + index * self.settings.tensor_parallel
            calls.append((handle, handle.init_weight_transfer.remote(own_info)))
        self.collect(calls)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, info: dict) -> None:
        self.call("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self.group is not None and self.group.is_aborted:
            return  # not all weights were received
        self.group = None  # complete: an engine that dies from here on blocks no other
        self.call("finish_weight_update", self.version)


class Sender:
    """One rank's side of the weight sync. Collective: every rank makes the same calls."""

    def __init__(self, chunks: list, arch: Architecture, config: Config, backend: str):
        self.chunks = chunks
        self.arch = arch
        self.sync = config.sync
        self.engine = config.engine
        self.backend = backend
        self._transport: Transport | None = None
        self._engine_ids: list[str] | None = None  # that the transport is connected to

    def send(self, handles: list, version: int) -> None:
        """Send the current weights to every engine, which must be paused or not serving yet."""
        engines = Engines(handles, version, self.engine, self.sync.timeout_s)
        ids = [handle._actor_id.hex() for handle in handles]
        if self._transport is None or self._engine_ids != ids:
            if self._transport is not None:
                self._transport.close()
            self._transport = self._connect(engines)
            self._engine_ids = ids
        sent = self._transport.send(engines)
        problem: list[str | None] = [None]
        if sent and _rank() == 0:
            problem[0] = _first_difference(sent, engines.call("received_checksums"))
        dist.broadcast_object_list(problem, src=0)
        if problem[0]:
            raise SyncError(problem[0])

    def _connect(self, engines: Engines) -> "Transport":
        transports: dict[str, type[Transport]] = {
            "shm": ShmTransport,
            "ipc": IpcTransport,
            "nccl": NcclTransport,
        }
        return transports[self.backend](self, engines)


def _rank() -> int:
    return parallel.place().rank


def _first_difference(sent: dict[str, int], received: list[list[dict[str, int]]]) -> str | None:
    """A message for the first mismatch. received: by engine, then by worker."""
    for worker_sums in (sums for engine_sums in received for sums in engine_sums):
        for name in sorted(sent.keys() | worker_sums.keys()):
            if sent.get(name) != worker_sums.get(name):
                return f"sync.verify: checksum mismatch in tensor {name}"
    return None


# ---------------------------------------------------------------- shared memory


@dataclass(frozen=True)
class Slot:
    """The place of an HF tensor in a half of the segment."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # bytes


@dataclass(frozen=True)
class Bucket:
    mappings: list[ParamMapping]
    slots: dict[str, Slot]
    nbytes: int


class ShmTransport:
    """A segment of two halves: engines load one while the ranks fill the other."""

    def __init__(self, sender: Sender, engines: Engines):
        self.arch = sender.arch
        self.verify = sender.sync.verify
        self.place = parallel.place()
        self.local = local_shards(sender.chunks, self.arch)
        self.holders = find_holders(self.local)
        self.buckets = [
            _lay_out(mappings, self.holders)
            for mappings in buckets_of(self.arch, self.holders, sender.sync.bucket_mb << 20)
        ]
        self.half_bytes = max(bucket.nbytes for bucket in self.buckets)
        self.memory = self._attach(engines)  # [2 × half_bytes]

    def _attach(self, engines: Engines) -> Tensor:
        """Map one segment into every rank and every engine."""
        nbytes = 2 * self.half_bytes
        if self.place.rank:
            received: list = [None]
            dist.broadcast_object_list(received, src=0)
            memory = shm.attach(received[0], nbytes)
            dist.barrier()
            return memory
        with shm.create(nbytes) as path:
            dist.broadcast_object_list([path], src=0)
            memory = shm.attach(path, nbytes)
            dist.barrier()
            engines.init_weight_transfer_engine({"path": path, "nbytes": nbytes})
        return memory

    def send(self, engines: Engines) -> dict[str, int] | None:
        """Send every bucket; returns the checksums by HF name if sync.verify is set."""
        sums: dict[str, int] = {}
        loading: list[list[tuple]] = [[], []]  # by half: pending calls of the engines
        if self.place.rank == 0:
            engines.start_weight_update()
        for index, bucket in enumerate(self.buckets):
            half = index % 2
            start = half * self.half_bytes
            engines.collect(loading[half])
            dist.barrier()  # the half is free
            self._fill(bucket, start, sums)
            dist.barrier()  # all ranks have written
            if self.place.rank == 0:
                loading[half] = engines.submit("update_weights", _describe(bucket, start))
        if self.place.rank == 0:
            for calls in loading:
                engines.collect(calls)
            engines.finish_weight_update()
        return _sum_over_ranks(sums) if self.verify else None

    def _fill(self, bucket: Bucket, start: int, sums: dict[str, int]) -> None:
        """Copy this rank's shards of the bucket to `start` of the segment."""
        for index, mapping in enumerate(bucket.mappings):
            local = self.local.get(mapping.megatron)
            if local is None:
                continue
            shard, _ = shard_of(mapping, self.place)
            is_sharded = mapping.sharding.axis is not None
            replicas = shard_holders(mapping, self.holders)[shard if is_sharded else 0]
            if not self._copies(replicas, index):
                continue
            for part in hf_slices(mapping, local, self.arch, shard):
                slot = bucket.slots[part.name]
                part.copy_into(_view(self.memory, slot, start))
                if self.verify:
                    columns = torch.Size(slot.shape[1:]).numel()
                    term = checksum(part.tensor, part.offset, columns)
                    sums[part.name] = add(sums.get(part.name, 0), term)

    def _copies(self, replicas: list[Holder], index: int) -> bool:
        """Whether this rank copies the shard: its holders divide parameters round-robin."""
        return replicas[index % len(replicas)].rank == self.place.rank

    def close(self) -> None:
        """The kernel frees the segment when nothing maps it."""


def _lay_out(mappings: list[ParamMapping], holders: Holders) -> Bucket:
    slots = {}
    end = 0  # bytes
    for mapping in mappings:
        dtype = holders[mapping.megatron][0][0].dtype
        for name, shape in mapping.hf:
            slots[name] = Slot(name, shape, dtype, end)
            end += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGN) * _ALIGN
    return Bucket(mappings, slots, end)


def _view(memory: Tensor, slot: Slot, start: int) -> Tensor:
    nbytes = torch.Size(slot.shape).numel() * slot.dtype.itemsize
    return memory[start + slot.offset :][:nbytes].view(slot.dtype).view(slot.shape)


def _describe(bucket: Bucket, start: int) -> dict[str, list]:
    """The bucket at `start` of the segment, as a ShmBucket."""
    slots = bucket.slots.values()
    return {
        "names": [slot.name for slot in slots],
        "dtypes": [str(slot.dtype).removeprefix("torch.") for slot in slots],
        "shapes": [list(slot.shape) for slot in slots],
        "offsets": [start + slot.offset for slot in slots],
    }


def _sum_over_ranks(sums: dict[str, int]) -> dict[str, int]:
    gathered: list = [None] * parallel.place().world
    dist.all_gather_object(gathered, sums)
    total: dict[str, int] = {}
    for rank_sums in gathered:
        for name, term in rank_sums.items():
            total[name] = add(total.get(name, 0), term)
    return total


# ---------------------------------------------------------------- GPUs, through vLLM's senders


class IpcTransport:
    """vLLM's `ipc`: engines map a buffer of the rank on their GPU. Not run on a GPU yet."""

    def __init__(self, sender: Sender, engines: Engines):
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCTrainerInitInfo,
            IPCTrainerWeightTransferEngine,
        )

        self.source: Any = _source(sender)
        # vLLM rejects a tensor that is larger than the buffer.
        largest = max(math.prod(m.shape) * m.dtype.itemsize for m in self.source.metadata())
        info = IPCTrainerInitInfo(
            rank=_rank(),
            packed=True,
            packed_buffer_size_bytes=max(sender.sync.bucket_mb << 20, largest),
        )
        self.trainer = IPCTrainerWeightTransferEngine.trainer_init(
            info, client=engines, source=self.source
        )

    def send(self, engines: Engines) -> dict[str, int] | None:
        self.trainer.client = engines
        self.trainer.send_weights()
        return self.source.sums

    def close(self) -> None:
        """vLLM frees the buffer after every send."""


class NcclTransport:
    """vLLM's `nccl`: rank 0 broadcasts to all workers. Not run on a GPU yet."""

    def __init__(self, sender: Sender, engines: Engines):
        self.source: Any = _source(sender)
        # No bucket is larger, so that every message of vLLM's ends in another bucket than it began:
        # `gather_hf` waits in between, before torch can reuse memory that a message still reads.
        self.buffer_bytes = max(sender.sync.bucket_mb << 20, self.source.largest_parameter())
        self._connect(engines)

    def send(self, engines: Engines) -> dict[str, int] | None:
        """Send to the engines that are left, until none is lost on the way. Collective."""
        while not self._send_once(engines):
            self._connect(engines)
        return self.source.sums

    def _send_once(self, engines: Engines) -> bool:
        """False, on every rank, if the group was aborted and engines are left."""
        engines.group = self.group
        if self.trainer is not None:
            self.trainer.client = engines
            self._send_weights()
        else:
            self.source.take_part()
        if self.group.error is not None:
            raise self.group.error
        if self.group.is_aborted:
            engines.group = None
            engines.call("abandon_weight_update")
        is_done = [not self.group.is_aborted or not engines.handles]
        dist.broadcast_object_list(is_done, src=0)
        return is_done[0]

    def _send_weights(self) -> None:
        try:
            self.trainer.send_weights()
        except RuntimeError:
            if not self.group.is_aborted:
                raise
            # The abort interrupted a call of NCCL, while the other ranks gather.
            self.source.exhaust()

    def _connect(self, engines: Engines) -> None:
        """Form the group. It is aborted if an engine is lost: `trainer` is then None.

        In a thread: without all of its members ncclCommInitRank never returns.
        """
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        address, port = _own_address()
        info = NCCLTrainerInitInfo(
            rank=_rank(),
            master_address=address,
            master_port=port,
            world_size=1 + len(engines.handles) * engines.settings.tensor_parallel,
            packed_buffer_size_bytes=self.buffer_bytes,
        )
        self.group = engines.group = nccl.Group()
        self.trainer: Any = None
        executor = ThreadPoolExecutor(1, initializer=parallel.use, initargs=(parallel.device(),))
        connecting = executor.submit(
            NCCLTrainerWeightTransferEngine.trainer_init, info, client=engines, source=self.source
        )
        executor.shutdown(wait=False)
        while not (connecting.done() or self.group.is_aborted):
            wait([connecting], timeout=0.1)
        if not self.group.is_aborted:
            self.trainer = connecting.result()
            self.group.communicator = self.trainer.model_update_group

    def close(self) -> None:
        self.group.close()


Transport = ShmTransport | IpcTransport | NcclTransport


def _source(sender: Sender) -> Any:
    """The model as vLLM's WeightSource; defined here because vLLM takes seconds to import."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    bucket_bytes = sender.sync.bucket_mb << 20

    class MegatronSource(WeightSource):
        """All methods are collective."""

        sums: dict[str, int] | None = None  # of the last iteration

        def __init__(self) -> None:
            self._iterator: Iterator[tuple[str, Tensor]] = iter(())

        def metadata(self) -> list:
            holders = find_holders(local_shards(sender.chunks, sender.arch))
            (mappings,) = buckets_of(sender.arch, holders, bucket_bytes=1 << 62)
            return [
                ParamMeta(name, holders[mapping.megatron][0][0].dtype, shape)
                for mapping in mappings
                for name, shape in mapping.hf
            ]

        def largest_parameter(self) -> int:
            """Bytes of Megatron's largest parameter, which may be several HF tensors."""
            holders = find_holders(local_shards(sender.chunks, sender.arch))
            (mappings,) = buckets_of(sender.arch, holders, bucket_bytes=1 << 62)
            return max(_lay_out([mapping], holders).nbytes for mapping in mappings)

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            self._iterator = self._tensors()
            return self._iterator

        def _tensors(self) -> Iterator[tuple[str, Tensor]]:
            self.sums = {} if sender.sync.verify else None
            for name, tensor in gather_hf(sender.chunks, sender.arch, bucket_bytes):
                if self.sums is not None:
                    self.sums[name] = checksum(tensor)
                yield name, tensor

        def exhaust(self) -> None:
            """Complete the last iteration."""
            for _ in self._iterator:
                pass

        def take_part(self) -> None:
            """The collective calls of a rank that sends."""
            self.metadata()
            for _ in self:
                pass

    return MegatronSource()


def _own_address() -> tuple[str, int]:
    """The rendezvous address on rank 0; that of other ranks is not used."""
    return ray.util.get_node_ip_address(), free_port()
