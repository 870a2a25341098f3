"""Bytes of weight syncs, as counted on ranks and as planned."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megastep.config import Config
from megastep.distributed import parallel
from megastep.models.architecture import read_architecture
from megastep.plan.model_states import model_states
from megastep.plan.weight_sync import Traffic, sync_traffic
from megastep.sync import shm
from megastep.sync.shm_transport import ShmTransport
from megastep.weights.mapping import HFSlice
from tests import cases


def config(folder: Path, layout: dict, ranks: int, colocate: bool = False) -> Config:
    settings = {
        "sync.bucket_mb": 1,
        "policy.ranks": ranks,
        "policy.precision": "fp32",
        "cluster.colocate": colocate,
    }
    return cases.make_config(folder, layout, settings)


def planned(folder: Path, layout: dict, ranks: int, colocate: bool = False) -> Traffic:
    arch = read_architecture(folder)
    plan = config(folder, layout, ranks, colocate)
    return sync_traffic(plan, arch, model_states(plan, arch))


# ---------------------------------------------------------------- on ranks


@contextmanager
def gathers(counted: Counter) -> Iterator[None]:
    """Counts what this rank sends and receives in broadcasts of tensors."""
    broadcast = dist.broadcast

    def count(tensor, src, *rest, **named):
        direction = "sent" if src == parallel.place().rank else "received"
        counted[direction] += tensor.nbytes
        return broadcast(tensor, src, *rest, **named)

    with mock.patch.object(dist, "broadcast", count):
        yield


class ReadingEngines:
    """Read the segment as engines do, at once."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}

    def init_weight_transfer_engine(self, info: dict) -> None:
        self.memory = shm.attach(info["path"], info["nbytes"])

    def submit(self, method: str, bucket: dict) -> list:
        for name, dtype, shape, start in zip(
            bucket["names"], bucket["dtypes"], bucket["shapes"], bucket["offsets"], strict=True
        ):
            nbytes = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            part = self.memory[start : start + nbytes].view(getattr(torch, dtype))
            self.received[name] = part.view(shape).clone()
        return []

    def collect(self, calls: list) -> None:
        pass

    start_weight_update = finish_weight_update = lambda self: None


def shm_bytes(folder: Path, layout: dict) -> dict:
    """Of a weight sync: bytes that this rank copied and gathered; on rank 0 also whether the
    engines have the weights."""
    worker = cases.make_worker(folder, layout, {"sync.bucket_mb": 1})
    engines = ReadingEngines()
    copied: Counter[str] = Counter()
    gathered: Counter[str] = Counter()
    with gathers(gathered), mock.patch.object(HFSlice, "copy_into", counting_copies(copied)):
        transport = ShmTransport(worker.chunks, worker.arch, worker.config, engines)
        transport.send(engines)
    expected = {name: tensor.clone() for name, tensor in worker.hf_tensors()}
    is_first = parallel.place().rank == 0
    return dict(
        sent=copied["bytes"],
        gathered=gathered["received"],
        is_equal=not is_first or same(engines.received, expected),
    )


def counting_copies(copied: Counter) -> Callable:
    copy_into = HFSlice.copy_into

    def copy(part: HFSlice, whole: torch.Tensor) -> None:
        copied["bytes"] += part.tensor.nbytes
        copy_into(part, whole)

    return copy


def same(received: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return received.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in received.items()
    )
