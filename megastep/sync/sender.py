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
(shm), or vLLM's send buffers of one bucket each; a tensor larger than `sync.bucket_mb` is a bucket.

Engines are Ray actors with the methods that `Engines` calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError
from torch import Tensor

from megastep.config import Config
from megastep.distributed import parallel
from megastep.distributed.ports import free_port
from megastep.errors import SyncError
from megastep.models.architecture import Architecture
from megastep.sync import shm
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

_ALIGN = 64  # bytes; vLLM packs the tensors directly from the segment


class Engines:
    """The control plane of a weight sync, on rank 0.

    An engine that dies or hangs is dropped; the sync continues with the others.
    """

    def __init__(self, handles: list, version: int, tensor_parallel: int, timeout_s: float):
        self.handles = list(handles)
        self.version = version
        self.tensor_parallel = tensor_parallel  # workers per engine
        self.timeout_s = timeout_s

    def call(self, method: str, *arguments) -> list:
        return self.collect(self.submit(method, *arguments))

    def submit(self, method: str, *arguments) -> list[tuple]:
        return [(handle, getattr(handle, method).remote(*arguments)) for handle in self.handles]

    def collect(self, calls: list[tuple]) -> list:
        results = []
        for handle, reference in calls:
            try:
                results.append(ray.get(reference, timeout=self.timeout_s))
            except (RayActorError, OutOfMemoryError, GetTimeoutError) as error:
                if isinstance(error, GetTimeoutError):
                    ray.kill(handle)  # it must not serve with half of the weights
                if handle in self.handles:
                    self.handles.remove(handle)
        return results

    # Called by vLLM's senders.

    def init_weight_transfer_engine(self, info: dict) -> None:
        calls = []
        for index, handle in enumerate(self.handles):
            own_info = dict(info)
            if "rank_offset" in info:  # in the nccl group: rank 0, then engine by engine
                own_info["rank_offset"] = 1 + index * self.tensor_parallel
            calls.append((handle, handle.init_weight_transfer.remote(own_info)))
        self.collect(calls)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, info: dict) -> None:
        self.call("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", self.version)


class Sender:
    """One rank's side of the weight sync. Collective: every rank makes the same calls."""

    def __init__(self, chunks: list, arch: Architecture, config: Config, backend: str):
        self.chunks = chunks
        self.arch = arch
        self.sync = config.sync
        self.engine = config.engine
        self.backend = backend
        self._transport: ShmTransport | VllmTransport | None = None
        self._engine_ids: list[str] | None = None  # that the transport is connected to

    def send(self, handles: list, version: int) -> None:
        """Send the current weights to every engine, which must be paused or not serving yet."""
        engines = Engines(
            handles, version, self.engine.tensor_parallel, self.engine.request_timeout_s
        )
        ids = [handle._actor_id.hex() for handle in handles]
        if self._transport is None or self._engine_ids != ids:
            self._transport = self._connect(engines)
            self._engine_ids = ids
        sent = self._transport.send(engines)
        problem: list[str | None] = [None]
        if sent and _rank() == 0:
            problem[0] = _first_difference(sent, engines.call("received_checksums"))
        dist.broadcast_object_list(problem, src=0)
        if problem[0]:
            raise SyncError(problem[0])

    def _connect(self, engines: Engines) -> "ShmTransport | VllmTransport":
        if self.backend == "shm":
            return ShmTransport(self, engines)
        return VllmTransport(self, engines)


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


class VllmTransport:
    """vLLM's `nccl` or `ipc`. Written against vLLM 0.30, not run on a GPU yet."""

    def __init__(self, sender: Sender, engines: Engines):
        self.sender = sender
        self.source: Any = _source(sender)
        connect = self._nccl if sender.backend == "nccl" else self._ipc
        self.trainer = connect(engines, sender.sync.bucket_mb << 20)

    def send(self, engines: Engines) -> dict[str, int] | None:
        self.trainer.client = engines
        self.source.sums = {} if self.sender.sync.verify else None
        self.trainer.send_weights()
        return self.source.sums

    def _nccl(self, engines: Engines, buffer_bytes: int) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        address, port = _own_address()
        info = NCCLTrainerInitInfo(
            rank=_rank(),
            master_address=address,
            master_port=port,
            world_size=1 + len(engines.handles) * engines.tensor_parallel,
            packed_buffer_size_bytes=buffer_bytes,
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=engines, source=self.source
        )

    def _ipc(self, engines: Engines, buffer_bytes: int) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCTrainerInitInfo,
            IPCTrainerWeightTransferEngine,
        )

        info = IPCTrainerInitInfo(rank=_rank(), packed=True, packed_buffer_size_bytes=buffer_bytes)
        return IPCTrainerWeightTransferEngine.trainer_init(info, client=engines, source=self.source)


def _source(sender: Sender) -> Any:
    """The model as vLLM's WeightSource; defined here because vLLM takes seconds to import."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class MegatronSource(WeightSource):
        sums: dict[str, int] | None = None

        def metadata(self) -> list:
            holders = find_holders(local_shards(sender.chunks, sender.arch))
            (mappings,) = buckets_of(sender.arch, holders, bucket_bytes=1 << 62)
            return [
                ParamMeta(name, holders[mapping.megatron][0][0].dtype, shape)
                for mapping in mappings
                for name, shape in mapping.hf
            ]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            bucket_bytes = sender.sync.bucket_mb << 20
            for name, tensor in gather_hf(sender.chunks, sender.arch, bucket_bytes):
                if self.sums is not None:
                    self.sums[name] = checksum(tensor)
                yield name, tensor

    return MegatronSource()


def _own_address() -> tuple[str, int]:
    """The rendezvous address on rank 0; that of other ranks is not used."""
    return ray.util.get_node_ip_address(), free_port()
