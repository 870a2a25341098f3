"""A push: the policy's weights, whatever its layout, into every engine, bucket by bucket, without touching disk.

    shm    one machine, no GPU needed. Every rank copies the cuts it holds to where they belong in a segment of shared
           memory, so nothing is gathered; engines load one half while the ranks fill the other.
    nccl   engines on GPUs of their own: rank 0 broadcasts to all of them        } vLLM's own senders, fed with
    ipc    engines on the policy's GPUs: each rank hands over its GPU's memory   } `gathered_hf`; not run on a GPU

A push has a version, the number of optimizer steps behind the weights, and every engine knows its own. Memory: two
buckets (shm), or vLLM's send buffers of a bucket each; a tensor larger than `sync.bucket_mb` goes alone.

Engines are Ray actors with the methods that `Engines` calls; this module knows nothing else of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
from megastep.weights.mapping import Row, pieces_of
from megastep.weights.megatron import (
    buckets_of,
    cut_of,
    find_holders,
    gathered_hf,
    holders_needed,
    local_cuts,
)

_ALIGN = 64  # bytes; vLLM's packing reads the tensors where they lie


class Engines:
    """The control plane of a push, on rank 0. An engine that dies or hangs drops out; the others go on."""

    def __init__(self, handles: list, version: int, tensor: int, timeout_s: float):
        self.handles = list(handles)
        self.version = version
        self.tensor = tensor  # workers of one engine
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
                    ray.kill(handle)  # with half of its weights it must not serve
                if handle in self.handles:
                    self.handles.remove(handle)
        return results

    # The names that vLLM's senders call.

    def init_weight_transfer_engine(self, info: dict) -> None:
        calls = []
        for index, handle in enumerate(self.handles):
            # Each engine's workers follow those of the engine before in the nccl group.
            own = {"rank_offset": 1 + index * self.tensor} if "rank_offset" in info else {}
            calls.append((handle, handle.init_weight_transfer.remote({**info, **own})))
        self.collect(calls)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, info: dict) -> None:
        self.call("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", self.version)


class Sender:
    """One rank's part in every push. Collective: all ranks make one, and call `push` with the same arguments."""

    def __init__(self, chunks: list, arch: Architecture, config: Config, backend: str):
        self.chunks, self.arch, self.sync = chunks, arch, config.sync
        self.backend, self.engine = backend, config.engine
        self._route, self._route_to = None, None  # open to these engines

    def send(self, handles: list, version: int) -> None:
        """Give every engine the weights of this moment. Engines should be paused, or not serving yet."""
        engines = Engines(
            handles, version, self.engine.tensor_parallel, self.engine.request_timeout_s
        )
        ids = [handle._actor_id.hex() for handle in handles]
        if self._route_to != ids:
            self._route, self._route_to = self._open(engines), ids
        sent = self._route.send(engines)
        problem = (
            _first_difference(sent, engines.call("received_checksums"))
            if sent and _rank() == 0
            else None
        )
        problems = [problem]
        dist.broadcast_object_list(problems, src=0)
        if problems[0]:
            raise SyncError(problems[0])

    def _open(self, engines: Engines):
        if self.backend == "shm":
            return ShmRoute(self, engines)
        return VllmRoute(self, engines)


def _rank() -> int:
    return parallel.place().rank


def _first_difference(sent: dict[str, int], received: list[list[dict[str, int]]]) -> str | None:
    """Each engine answers with one table per worker."""
    for table in (table for engine in received for table in engine):
        for name in sorted(sent.keys() | table.keys()):
            if sent.get(name) != table.get(name):
                return f"sync.verify: tensor {name} arrived with another checksum than it was sent with"
    return None


# ---------------------------------------------------------------- shared memory


@dataclass(frozen=True)
class Slot:
    """Where an HF tensor lies in a half of the segment."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True)
class Bucket:
    rows: list[Row]
    slots: dict[str, Slot]
    nbytes: int


class ShmRoute:
    """Two halves: engines load one while the ranks fill the other."""

    def __init__(self, sender: Sender, engines: Engines):
        self.sender, self.arch = sender, sender.arch
        self.place = parallel.place()
        self.local = local_cuts(sender.chunks, self.arch)
        self.holders = find_holders(self.local)
        rows = buckets_of(self.arch, self.holders, sender.sync.bucket_mb << 20)
        self.buckets = [_lay_out(bucket, self.holders) for bucket in rows]
        self.half = max(bucket.nbytes for bucket in self.buckets)
        self.memory = self._invite(engines)

    def _invite(self, engines: Engines) -> Tensor:
        size, name = 2 * self.half, [None]
        if self.place.rank:
            dist.broadcast_object_list(name, src=0)
            memory = shm.join(name[0], size)
            dist.barrier()
            return memory
        with shm.invitation(size) as path:
            dist.broadcast_object_list([path], src=0)
            memory = shm.join(path, size)
            dist.barrier()
            engines.init_weight_transfer_engine({"path": path, "nbytes": size})
        return memory

    def send(self, engines: Engines) -> dict[str, int] | None:
        """The checksums of what was sent, on rank 0, if they are wanted."""
        sums: dict[str, int] = {}
        loading: list = [None, None]  # by half: calls of the engines that read it
        if self.place.rank == 0:
            engines.start_weight_update()
        for index, bucket in enumerate(self.buckets):
            half = index % 2
            if loading[half]:
                engines.collect(loading[half])
            dist.barrier()  # the half is free
            self._fill(bucket, half * self.half, sums)
            dist.barrier()  # all ranks have written
            if self.place.rank == 0:
                loading[half] = engines.submit(
                    "update_weights", _describe(bucket, half * self.half)
                )
        if self.place.rank == 0:
            for calls in filter(None, loading):
                engines.collect(calls)
            engines.finish_weight_update()
        return _sum_over_ranks(sums) if self.sender.sync.verify else None

    def _fill(self, bucket: Bucket, start: int, sums: dict[str, int]) -> None:
        for index, row in enumerate(bucket.rows):
            cut, _ = cut_of(row, self.place)
            cuts = holders_needed(row, self.holders)
            local = self.local.get(row.megatron)
            if local is None or not self._is_mine(
                cuts[cut if row.form.axis is not None else 0], index
            ):
                continue
            for piece in pieces_of(row, local, self.arch, cut):
                slot = bucket.slots[piece.name]
                piece.into(_view(self.memory, slot, start))
                if self.sender.sync.verify:
                    columns = torch.Size(slot.shape[1:]).numel()
                    sums[piece.name] = add(
                        sums.get(piece.name, 0), checksum(piece.tensor, piece.offset, columns)
                    )

    def _is_mine(self, replicas: list, index: int) -> bool:
        """The ranks that hold the same cut share the copying."""
        return replicas[index % len(replicas)].rank == self.place.rank


def _lay_out(rows: list[Row], holders: dict) -> Bucket:
    slots, end = {}, 0
    for row in rows:
        dtype = holders[row.megatron][0][0].dtype
        for name, shape in row.hf:
            slots[name] = Slot(name, shape, dtype, end)
            end += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGN) * _ALIGN
    return Bucket(rows, slots, end)


def _view(memory: Tensor, slot: Slot, start: int) -> Tensor:
    nbytes = torch.Size(slot.shape).numel() * slot.dtype.itemsize
    return memory[start + slot.offset :][:nbytes].view(slot.dtype).view(slot.shape)


def _describe(bucket: Bucket, start: int) -> dict:
    slots = bucket.slots.values()
    return {
        "names": [slot.name for slot in slots],
        "dtypes": [str(slot.dtype).removeprefix("torch.") for slot in slots],
        "shapes": [list(slot.shape) for slot in slots],
        "offsets": [start + slot.offset for slot in slots],
    }


def _sum_over_ranks(sums: dict[str, int]) -> dict[str, int]:
    everywhere: list = [None] * parallel.place().world
    dist.all_gather_object(everywhere, sums)
    names = {name for part in everywhere for name in part}
    return {name: add(*(part.get(name, 0) for part in everywhere)) for name in names}


# ---------------------------------------------------------------- GPUs, through vLLM's own senders


class VllmRoute:
    """vLLM's `nccl` or `ipc`. Written against vLLM 0.30, not run on a GPU."""

    def __init__(self, sender: Sender, engines: Engines):
        self.sender = sender
        self.source = _source(sender)
        make = self._nccl if sender.backend == "nccl" else self._ipc
        self.trainer = make(engines, sender.sync.bucket_mb << 20)

    def send(self, engines: Engines) -> dict[str, int] | None:
        self.trainer.client = engines
        self.source.sums = {} if self.sender.sync.verify else None
        self.trainer.send_weights()
        return self.source.sums

    def _nccl(self, engines: Engines, buffer_bytes: int):
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        address, port = _own_address()
        info = NCCLTrainerInitInfo(
            rank=_rank(),
            master_address=address,
            master_port=port,
            world_size=1 + len(engines.handles) * engines.tensor,
            packed_buffer_size_bytes=buffer_bytes,
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=engines, source=self.source
        )

    def _ipc(self, engines: Engines, buffer_bytes: int):
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCTrainerInitInfo,
            IPCTrainerWeightTransferEngine,
        )

        info = IPCTrainerInitInfo(rank=_rank(), packed=True, packed_buffer_size_bytes=buffer_bytes)
        return IPCTrainerWeightTransferEngine.trainer_init(info, client=engines, source=self.source)


def _source(sender: Sender):
    """The model as vLLM's senders want it; made here because the base class is vLLM's, which takes long to import."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class MegatronSource(WeightSource):
        sums: dict[str, int] | None = None

        def metadata(self) -> list:
            holders = find_holders(local_cuts(sender.chunks, sender.arch))
            rows = (row for bucket in buckets_of(sender.arch, holders, 1 << 62) for row in bucket)
            return [
                ParamMeta(name, holders[row.megatron][0][0].dtype, shape)
                for row in rows
                for name, shape in row.hf
            ]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in gathered_hf(
                sender.chunks, sender.arch, sender.sync.bucket_mb << 20
            ):
                if self.sums is not None:
                    self.sums[name] = checksum(tensor)
                yield name, tensor

    return MegatronSource()


def _own_address() -> tuple[str, int]:
    """Where rank 0 waits for the engines; the other ranks' answer is not used."""
    return ray.util.get_node_ip_address(), free_port()
