"""What the policy's ranks and the engines' workers share in a weight sync over nccl.

A bucket is a flat array of bytes, the parts of rank 0 first. It is divided evenly into a chunk per
worker. Every rank sends its bytes to the workers whose chunks they are in; the workers then gather
the chunks among themselves:

    ranks           0         1              2      3
    bucket          ├─────────┼──────────────┼──────┼────────┤
    chunks          ├──────────────┼──────────────┼──────────┤      worker 0, 1, 2

So each rank sends its part of the model once, however many engines there are, none receives
anything, and each worker receives the model once.

NCCL waits forever for a member that died. Rank 0 learns of the death from Ray, or of a hung engine
by the deadline: it sets a key in the group's store. All members poll the key, and abort their
communicators. An aborted communicator completes what its streams wait for, and ignores later calls.

vLLM's processes import this module, so it imports no Megatron. Written against vLLM 0.30:
PyNcclCommunicator, StatelessProcessGroup and its store. Tested with fake communicators, not run on
a GPU yet.
"""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastep.weights.mapping import HFSlice

_KEY = "megastep/aborted"
_POLL_S = 0.5
_ALIGN = 16  # bytes, for any dtype


# ---------------------------------------------------------------- members


class Group:
    """A rank's or a worker's membership: the policy's ranks first, then the workers."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        members: int,
        listener: socket.socket | None = None,
    ):
        """listener: rank 0's socket at this address. Waits for no other member, unlike vLLM's
        StatelessProcessGroup.create."""
        from vllm.distributed.utils import StatelessProcessGroup

        store = dist.TCPStore(
            address,
            port,
            world_size=members,
            is_master=listener is not None,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        self._members = StatelessProcessGroup(rank, members, store)
        self._communicators: list[Any] = []
        self._leaving = threading.Lock()
        self._is_aborted = False

    def join(self, device: torch.device) -> Any:
        """The communicator of all members, a PyNcclCommunicator. Waits for all of them."""
        return self._communicator(self._members, device)

    def join_workers(self, ranks: int, device: torch.device) -> Any:
        """The communicator of all members except the policy's ranks."""
        from vllm.distributed.utils import StatelessProcessGroup

        workers = StatelessProcessGroup(
            rank=self._members.rank - ranks,
            world_size=self._members.world_size - ranks,
            store=dist.PrefixStore("workers", self._members.store),
        )
        return self._communicator(workers, device)

    def _communicator(self, members: Any, device: torch.device) -> Any:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        communicator = PyNcclCommunicator(members, device=device)
        self._communicators.append(communicator)
        return communicator

    @property
    def is_aborted(self) -> bool:
        if not self._is_aborted:
            try:
                self._is_aborted = self._members.store.check([_KEY])
            except RuntimeError:  # rank 0, which holds the store, is gone
                self._is_aborted = True
        return self._is_aborted

    def abort(self) -> None:
        """For all members, by rank 0."""
        self._is_aborted = True
        self._members.store.set(_KEY, b"1")
        self.leave()

    def leave(self) -> None:
        with self._leaving:
            while self._communicators:
                self._communicators.pop().destroy()  # vLLM would keep its GPU memory

    def until_joined(self, joining: Future) -> Any:
        """The communicator of `join` in a thread; None if the group is aborted meanwhile.

        Without all of its members ncclCommInitRank never returns.
        """
        while not joining.done() and not self.is_aborted:
            wait([joining], timeout=0.1)
        return None if self.is_aborted else joining.result()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Leave as soon as the group is aborted. An abort ends the block, and is no error in it.

        vLLM's executor reads only the first worker's error and would take those of the others for
        answers to its next calls.
        """
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(ended,), name="nccl-watch", daemon=True)
        watch.start()
        try:
            yield
        except RuntimeError:  # the abort interrupted a call of NCCL
            if not self.is_aborted:
                raise
        finally:
            ended.set()
            watch.join()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.is_set():
            if self.is_aborted:
                self.leave()
                return
            ended.wait(_POLL_S)


# ---------------------------------------------------------------- buckets


@dataclass(frozen=True)
class Bucket:
    """In the form of lists and numbers, as calls of engines carry it."""

    # By part: HF name, dtype, shape of the HF tensor, shape and offset of the part, first byte.
    parts: list[list]
    spans: list[list[int]]  # [rank, first byte, end]

    @property
    def nbytes(self) -> int:
        return self.spans[-1][2]

    def span(self, rank: int) -> tuple[int, int]:
        """Empty if the rank sends nothing."""
        return next(((start, end) for holder, start, end in self.spans if holder == rank), (0, 0))

    def chunk_bytes(self, workers: int) -> int:
        return padded(-(-self.nbytes // workers))


def padded(nbytes: int) -> int:
    """The bytes of a part in a bucket."""
    return -(-nbytes // _ALIGN) * _ALIGN


def pack(tensors: list[Tensor], nbytes: int, device: torch.device) -> Tensor:
    """A rank's bytes of a bucket: its parts in their order."""
    message = torch.empty(nbytes, dtype=torch.uint8, device=device)
    start = 0
    for tensor in tensors:
        message[start:][: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += padded(tensor.nbytes)
    return message


def unpack(flat: Tensor, bucket: Bucket) -> list[tuple[str, Tensor]]:
    """The HF tensors of a bucket. flat: all of its bytes."""
    tensors: dict[str, Tensor] = {}
    for name, dtype_name, shape, part_shape, offset, start in bucket.parts:
        dtype = getattr(torch, dtype_name)
        nbytes = torch.Size(part_shape).numel() * dtype.itemsize
        part = flat[start:][:nbytes].view(dtype).view(part_shape)
        if part_shape == shape:
            tensors[name] = part
            continue
        if name not in tensors:
            tensors[name] = torch.empty(shape, dtype=dtype, device=flat.device)
        HFSlice(name, part, tuple(offset)).copy_into(tensors[name])
    return list(tensors.items())


# ---------------------------------------------------------------- messages


def send(communicator: Any, message: Tensor, bucket: Bucket, ranks: int) -> None:
    """Send this rank's bytes of the bucket to the workers whose chunks they are in."""
    start, end = bucket.span(communicator.rank)
    workers = communicator.world_size - ranks
    chunk = bucket.chunk_bytes(workers)
    stream = torch.cuda.current_stream()
    communicator.group_start()
    for worker in range(start // chunk, -(-end // chunk)):
        first = max(start, worker * chunk)
        last = min(end, (worker + 1) * chunk)
        communicator.send(message[first - start : last - start], dst=ranks + worker, stream=stream)
    communicator.group_end()


def receive(
    communicator: Any, workers: Any, bucket: Bucket, ranks: int, device: torch.device
) -> Tensor:
    """All bytes of the bucket: this worker's chunk from the ranks, the others from the workers."""
    chunk = bucket.chunk_bytes(workers.world_size)
    flat = torch.empty(chunk * workers.world_size, dtype=torch.uint8, device=device)
    own_start = workers.rank * chunk
    stream = torch.cuda.current_stream()
    communicator.group_start()
    for rank, start, end in bucket.spans:
        first = max(start, own_start)
        last = min(end, own_start + chunk)
        if first < last:
            communicator.recv(flat[first:last], src=rank, stream=stream)
    communicator.group_end()
    workers.all_gather(flat, flat[own_start : own_start + chunk], stream=stream)
    return flat
