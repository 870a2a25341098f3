"""vLLM's ipc and nccl senders, run by ranks on a CPU: engines, GPUs and NCCL are fakes.

vLLM's code is real on both sides (senders, packing, receivers, StatelessProcessGroup with its
store), and so are Megatron and the ranks. Engines are threads of rank 0, behind the few functions
of Ray that a weight sync calls.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ray.exceptions import RayActorError

from megastep.distributed import parallel
from megastep.sync import sender as sender_module
from megastep.sync.sender import Sender
from tests import cases


@contextmanager
def gpus() -> Iterator[None]:
    """The functions of torch that vLLM's weight transfer calls on a GPU."""
    from vllm.distributed.weight_transfer import packed_tensor

    packed_tensor._get_streams.cache_clear()
    uuid = f"GPU-{parallel.place().rank}"
    cuda = dict(
        Stream=lambda device=None: SimpleNamespace(synchronize=lambda: None),
        stream=lambda stream: nullcontext(),
        current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
        synchronize=lambda: None,
        ipc_collect=lambda: None,
        get_device_properties=lambda index: SimpleNamespace(uuid=uuid),
    )
    accelerator = dict(current_device_index=lambda: 0, synchronize=lambda: None)
    cpu_torch = SimpleNamespace(**{**vars(torch), "empty": empty})
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(torch.accelerator, **accelerator),
        mock.patch.object(packed_tensor, "torch", cpu_torch),
    ):
        yield


def empty(*size: int, device: Any, **named) -> torch.Tensor:
    return torch.empty(*size, **named)


class Ray:
    """`ray` as the sender knows it; references are futures."""

    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    @staticmethod
    def wait(references: list, timeout: float) -> tuple[list, list]:
        done, _ = futures.wait(references, timeout, futures.FIRST_COMPLETED)
        return list(done)[:1], []

    @staticmethod
    def get(reference: futures.Future) -> Any:
        return reference.result()

    @staticmethod
    def kill(handle: "Engine") -> None:
        handle.die()


class Engine:
    """An actor: its calls run one after the other, in a thread, until it dies."""

    def __init__(self, index: int, worker: Any = None):
        self.worker = worker
        self.calls: list[str] = []
        self.versions: list[int] = []
        self.is_dead = threading.Event()
        self._actor_id = SimpleNamespace(hex=lambda: f"engine-{index}")
        self._thread = futures.ThreadPoolExecutor(max_workers=1)
        self._pending: list[futures.Future] = []

    def die(self) -> None:
        self.is_dead.set()
        for reference in self._pending:
            if not reference.done():
                reference.set_exception(RayActorError())

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._submit(method, *arguments))

    def _submit(self, method: str, *arguments) -> futures.Future:
        reference: futures.Future = futures.Future()
        self._pending.append(reference)
        if self.is_dead.is_set():
            reference.set_exception(RayActorError())
        else:
            self.calls.append(method)
            self._thread.submit(self._run, reference, method, *arguments)
        return reference

    def _run(self, reference: futures.Future, method: str, *arguments) -> None:
        try:
            result = getattr(self.worker, method)(*arguments)
        except Exception as error:
            if not self.is_dead.is_set():
                reference.set_exception(error)
        else:
            if not self.is_dead.is_set():
                reference.set_result(result)


# ---------------------------------------------------------------- ipc


class IpcWorker:
    """Reads the sender's buffer as an engine on its GPU would."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.version: int | None = None

    def init_weight_transfer(self, info: dict) -> None:
        assert info == {"packed": True}

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, info: dict) -> None:
        from torch.multiprocessing.reductions import rebuild_tensor
        from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

        buffer = rebuild_tensor(*info["ipc_handles"]["GPU-0"])
        self.buffer_bytes = buffer.numel()
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        used = buffer[: sum(info["tensor_sizes"])]
        tensors = unpack_tensor(used, info["names"], info["shapes"], dtypes, info["tensor_sizes"])
        self.received |= {name: tensor.clone() for name, tensor in tensors}

    def finish_weight_update(self, version: int) -> None:
        self.version = version


def ipc_sync(folder, layout: dict, bucket_mb: int) -> dict:
    """On rank 0: the size of the buffer and what an engine received."""
    worker = cases.make_worker(folder, layout, {"sync.bucket_mb": bucket_mb})
    engine = Engine(0, IpcWorker())
    with mock.patch.object(sender_module, "ray", Ray), gpus():
        sender = Sender(worker.chunks, worker.arch, worker.config, "ipc")
        sender.send([engine], version=7)
    expected = {name: tensor.clone() for name, tensor in worker.hf_tensors()}
    if parallel.place().rank != 0:
        return {}
    received = engine.worker.received
    return dict(
        buffer=engine.worker.buffer_bytes,
        version=engine.worker.version,
        largest=max(tensor.nbytes for tensor in expected.values()),
        is_equal=same(received, expected),
    )


def same(received: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return received.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in received.items()
    )


# ---------------------------------------------------------------- nccl


class Wire:
    """What the communicators of a group share: one message at a time, for all members."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.joined: set[int] = set()
        self.sent: list[torch.Tensor] = []
        self.received: dict[int, int] = {}  # messages by rank


class Communicator:
    """vLLM's PyNcclCommunicator. As NCCL, it waits for all members until it is aborted."""

    wires: dict[str, Wire] = {}
    sizes: list[int]  # of the groups formed, on rank 0
    trouble: Callable[[int, int], None]  # (rank in the group, message): what happens to a member

    def __init__(self, group, device, library_path=None):
        self.group = group
        self.rank = group.rank
        self.world_size = group.world_size
        self.disabled = False
        name = group.broadcast_obj(f"wire-{time.monotonic_ns()}", src=0)
        self.wire = self.wires.setdefault(name, Wire())
        Communicator.trouble(self.rank, 0)
        self._change(lambda: self.wire.joined.add(self.rank))
        self._until(lambda: len(self.wire.joined) == self.world_size)
        if self.rank == 0:
            self.sizes.append(self.world_size)

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        if self.disabled:
            return
        if self.rank == 0:
            self._change(lambda: self.wire.sent.append(tensor.clone()))
            number = len(self.wire.sent)
            members = range(1, self.world_size)
            self._until(lambda: all(self.wire.received.get(r, 0) >= number for r in members))
            return
        number = self.wire.received.get(self.rank, 0) + 1
        Communicator.trouble(self.rank, number)
        self._until(lambda: len(self.wire.sent) >= number)
        tensor.copy_(self.wire.sent[number - 1])
        self._change(lambda: self.wire.received.update({self.rank: number}))

    def destroy(self) -> None:
        self.disabled = True
        self._change(lambda: None)

    def _change(self, change: Callable[[], Any]) -> None:
        with self.wire.changed:
            change()
            self.wire.changed.notify_all()

    def _until(self, condition: Callable[[], bool]) -> None:
        with self.wire.changed:
            self.wire.changed.wait_for(lambda: self.disabled or condition())
        if self.disabled:
            raise RuntimeError("NCCL error: unhandled system error")  # of an interrupted call


def nccl_worker(received: dict[str, torch.Tensor]) -> Any:
    """vLLM's worker, as far as weight syncs go, with the real receiver around a fake model."""
    from megastep.sync.receiver import NcclReceiver, WorkerExtension

    class Model(torch.nn.Module):
        def load_weights(self, weights) -> set[str]:
            received.update({name: tensor.clone() for name, tensor in weights})
            return set()

    class Worker(WorkerExtension):
        _weight_update_active = False

        def __init__(self) -> None:
            text = SimpleNamespace(tie_word_embeddings=False)
            config = SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0),
                model_config=SimpleNamespace(hf_text_config=text),
                additional_config={"sync_verify": False},
            )
            device = torch.device("cpu")
            self.weight_transfer_engine: Any = NcclReceiver(None, config, device, Model())
            self.version: int | None = None

        def init_weight_transfer(self, info: dict) -> None:
            engine = self.weight_transfer_engine
            engine.init_transfer_engine(engine.parse_init_info(info))

        def start_weight_update(self) -> None:
            assert not self._weight_update_active  # vLLM's own check
            self.weight_transfer_engine.start_weight_update()
            self._weight_update_active = True

        def update_weights(self, info: dict) -> None:
            self.weight_transfer_engine.update_weights(info)

        def finish_weight_update(self, version: int) -> None:
            self.weight_transfer_engine.finish_weight_update()
            self._weight_update_active = False
            self.version = version

    return Worker()


def nccl_syncs(folder, layout: dict, lost: int, message: int, hangs: bool) -> dict:
    """Two weight syncs to three engines, of which `lost` dies or hangs in the first one, at a
    message; message 0: when the group forms. On rank 0: what became of them."""
    settings = {
        "sync.bucket_mb": 1,
        "sync.timeout_s": 3 if hangs else 60,
        "engine.health_timeout_s": 10,
    }
    worker = cases.make_worker(folder, layout, settings)
    received: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    is_sender = parallel.place().rank == 0  # other ranks know the ids of engines only
    engines = [Engine(i, nccl_worker(received[i]) if is_sender else None) for i in range(3)]
    with (
        mock.patch.object(sender_module, "ray", Ray),
        mock.patch("vllm.distributed.device_communicators.pynccl.PyNcclCommunicator", Communicator),
        gpus(),
    ):
        Communicator.sizes = []
        Communicator.trouble = trouble(engines[lost], lost + 1, message, hangs)
        sender = Sender(worker.chunks, worker.arch, worker.config, "nccl")
        started = time.monotonic()
        sender.send(engines, version=1)
        seconds = time.monotonic() - started
        expected = {name: tensor.clone() for name, tensor in worker.hf_tensors()}
        complete = [same(of_engine, expected) for of_engine in received]
        dead = [[engine.is_dead.is_set() for engine in engines]]
        versions = [engine.worker.version for engine in engines] if is_sender else []
        dist.broadcast_object_list(dead, src=0)
        left = [engine for engine, is_dead in zip(engines, dead[0]) if not is_dead]
        if left:
            sender.send(left, version=2)
    if not is_sender:
        return {}
    return dict(
        seconds=seconds,
        complete=complete,
        versions=versions,
        dead=dead[0],
        second=[engine.worker.version for engine in engines],
        groups=Communicator.sizes,
    )


def trouble(engine: Engine, rank: int, message: int, hangs: bool) -> Callable[[int, int], None]:
    happened = threading.Event()

    def happen(at_rank: int, at_message: int) -> None:
        if (at_rank, at_message) != (rank, message) or happened.is_set():
            return
        happened.set()
        if hangs:
            engine.is_dead.wait(100)  # until it is killed
        else:
            engine.die()
        raise ConnectionError("the process has ended")

    return happen
