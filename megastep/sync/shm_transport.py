"""Engines on this node: every rank copies its shards into place in a segment of shared memory.

Nothing is gathered, and replicas divide the copies (shares.py).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megastep.config import Config
from megastep.distributed import parallel
from megastep.models.architecture import Architecture
from megastep.sync import shm
from megastep.sync.engines import Engines
from megastep.sync.shares import Share, add_checksum, divide, sum_over_ranks
from megastep.weights.megatron import find_holders, local_shards

_ALIGN = 64  # bytes; vLLM packs the tensors directly from the segment


@dataclass(frozen=True)
class Slot:
    """The place of an HF tensor in a half of the segment."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # bytes


@dataclass(frozen=True)
class Bucket:
    own: list[Share]  # of this rank
    slots: dict[str, Slot]
    nbytes: int


class ShmTransport:
    """A segment of two halves: engines load one while the ranks fill the other."""

    def __init__(self, chunks: list, arch: Architecture, config: Config, engines: Engines):
        self.arch = arch
        self.verify = config.sync.verify
        self.place = parallel.place()
        self.local = local_shards(chunks, arch)
        holders = find_holders(self.local)
        divided = divide(arch, holders, config.sync.bucket_mb << 20)
        self.buckets = [_lay_out(shares, self.place.rank) for shares in divided]
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
        return sum_over_ranks(sums) if self.verify else None

    def _fill(self, bucket: Bucket, start: int, sums: dict[str, int]) -> None:
        """Copy this rank's shares of the bucket to `start` of the segment."""
        for share in bucket.own:
            for part in share.slices(self.arch, self.local[share.mapping.megatron]):
                slot = bucket.slots[part.name]
                part.copy_into(_view(self.memory, slot, start))
                if self.verify:
                    add_checksum(sums, part, slot.shape)

    def close(self) -> None:
        """The kernel frees the segment when nothing maps it."""


def _lay_out(shares: list[Share], rank: int) -> Bucket:
    slots: dict[str, Slot] = {}
    end = 0  # bytes
    for share in shares:
        dtype = share.holder.dtype
        for name, shape in share.mapping.hf:
            if name in slots:  # another share has a part of it
                continue
            slots[name] = Slot(name, shape, dtype, end)
            end += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGN) * _ALIGN
    return Bucket([share for share in shares if share.holder.rank == rank], slots, end)


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
