"""Weight syncs of GPUs, run by ranks on a CPU: engines, GPUs and NCCL are fakes.

vLLM's code is real (ipc's sender, the base of the receivers, StatelessProcessGroup with its store),
and so are Megatron, the ranks, and our side of both. Engines are threads of rank 0, behind the few
functions of Ray that a weight sync calls. NCCL's messages go through the store.
"""

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayTaskError

from megastep.distributed import parallel
from megastep.errors import SyncError
from megastep.sync import engines as engines_module
from megastep.sync import nccl_transport
from megastep.sync.sender import Sender
from tests import cases
from tests.sync.counted import gathers, same


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
                reference.set_exception(RayTaskError(method, repr(error), error))
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
    """Bytes gathered; on rank 0 also the size of the buffer and what an engine received."""
    worker = cases.make_worker(folder, layout, {"sync.bucket_mb": bucket_mb})
    engine = Engine(0, IpcWorker())
    gathered: Counter[str] = Counter()
    with mock.patch.object(engines_module, "ray", Ray), gpus(), gathers(gathered):
        sender = Sender(worker.chunks, worker.arch, worker.config, "ipc")
        sender.send([engine], version=7)
    expected = {name: tensor.clone() for name, tensor in worker.hf_tensors()}
    if parallel.place().rank != 0:
        return dict(gathered=gathered)
    received = engine.worker.received
    return dict(
        gathered=gathered,
        buffer=engine.worker.buffer_bytes,
        version=engine.worker.version,
        largest=max(tensor.nbytes for tensor in expected.values()),
        is_equal=same(received, expected),
    )


# ---------------------------------------------------------------- nccl


class Communicator:
    """vLLM's PyNcclCommunicator. As NCCL, it waits for its peers until it is aborted."""

    sizes: list[int]  # of the groups formed, on rank 0
    sent: Counter[int]  # bytes, by member of the group
    received: Counter[int]
    trouble: Callable[[int, int], None]  # (member, message): what happens to a worker

    def __init__(self, group, device, library_path=None):
        self.group = group
        self.rank = group.rank
        self.world_size = group.world_size
        self.disabled = self.world_size == 1
        self._messages: Counter[tuple] = Counter()
        self._operations: list[tuple] = []
        self._is_of_workers = isinstance(group.store, dist.PrefixStore)
        if self.disabled:
            return
        self._happen(0)
        self._put(f"joined/{self.rank}", b"1")
        for member in range(self.world_size):
            self._until(f"joined/{member}")
        if self.rank == 0 and not self._is_of_workers:
            self.sizes.append(self.world_size)

    def group_start(self) -> None:
        self._operations = []

    def send(self, tensor: torch.Tensor, dst: int, stream=None) -> None:
        self._operations.append(("send", tensor, self._key(self.rank, dst)))

    def recv(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        self._operations.append(("recv", tensor, self._key(src, self.rank)))

    def group_end(self) -> None:
        """Everything is sent before anything is awaited."""
        if self.disabled:
            return
        self._messages["groups"] += 1
        self._happen(self._messages["groups"])
        for kind, tensor, key in self._operations:
            if kind == "send":
                self._put(key, tensor.numpy().tobytes())
                self.sent[self.rank] += tensor.nbytes
        for kind, tensor, key in self._operations:
            if kind == "recv":
                self._take(key, tensor)
                self._put(f"{key}/arrived", b"1")
            else:
                self._until(f"{key}/arrived")

    def all_gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, stream=None
    ) -> None:
        if self.disabled:
            return
        self._messages["gathers"] += 1
        number = self._messages["gathers"]
        self._put(f"gather/{number}/{self.rank}", input_tensor.numpy().tobytes())
        for member, chunk in enumerate(output_tensor.split(len(input_tensor))):
            if member != self.rank:
                self._take(f"gather/{number}/{member}", chunk)

    def destroy(self) -> None:
        self.disabled = True

    def _key(self, source: int, target: int) -> str:
        self._messages[source, target] += 1
        return f"{source}/{target}/{self._messages[source, target]}"

    def _happen(self, message: int) -> None:
        if not self._is_of_workers:
            Communicator.trouble(self.rank, message)

    def _put(self, key: str, value: bytes) -> None:
        self.group.store.set(key, value)

    def _take(self, key: str, target: torch.Tensor) -> None:
        self._until(key)
        value = bytearray(self.group.store.get(key))
        target.copy_(torch.frombuffer(value, dtype=torch.uint8))
        if not self._is_of_workers:
            self.group.store.delete_key(key)
            self.received[self.rank] += len(value)

    def _until(self, key: str) -> None:
        while not self.group.store.check([key]):
            if self.disabled:
                raise RuntimeError("NCCL error: unhandled system error")  # of an interrupted call
            time.sleep(0.002)


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
                additional_config={"sync_verify": True},
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

        def received_checksums(self) -> list[dict[str, int]]:  # as Engine, by worker
            return [super().received_checksums()]

    return Worker()


def differing_signatures() -> list[str]:
    """Methods of the fake whose parameters are not those of vLLM's class."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    methods = ("__init__", "send", "recv", "all_gather", "group_start", "group_end", "destroy")

    def parameters(owner: type, method: str) -> list[tuple]:
        found = inspect.signature(getattr(owner, method)).parameters.values()
        return [(parameter.name, parameter.default) for parameter in found]

    return [m for m in methods if parameters(Communicator, m) != parameters(PyNcclCommunicator, m)]


def load_twice() -> str:
    """The error of a receiver that is given a tensor again in one update."""
    receiver = nccl_worker({}).weight_transfer_engine
    weights = [("model.norm.weight", torch.ones(4))]
    for _ in range(2):  # in another update it is new
        receiver.start_weight_update()
        receiver.model.load_weights(weights)
        try:
            receiver.model.load_weights(weights)
        except ValueError as error:
            problem = str(error)
        receiver.abandon_weight_update()
    return problem


@contextmanager
def nccl() -> Iterator[None]:
    Communicator.sizes = []
    Communicator.sent = Counter()
    Communicator.received = Counter()
    Communicator.trouble = lambda member, message: None
    with (
        mock.patch.object(engines_module, "ray", Ray),
        mock.patch.object(nccl_transport, "ray", Ray),
        mock.patch("vllm.distributed.device_communicators.pynccl.PyNcclCommunicator", Communicator),
        gpus(),
    ):
        yield


def nccl_engines(count: int) -> tuple[list[Engine], list[dict[str, torch.Tensor]]]:
    """Engines, and what they receive; ranks other than 0 know the ids of engines only."""
    received: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    is_first = parallel.place().rank == 0
    engines = [Engine(i, nccl_worker(received[i]) if is_first else None) for i in range(count)]
    return engines, received


def nccl_bytes(folder, layout: dict, engines: int) -> dict:
    """Of a weight sync: bytes that this rank sent to engines, that it had sent when it waited for
    its GPU, and that it gathered; on rank 0 also whether all engines have the weights."""
    worker = cases.make_worker(folder, layout, {"sync.bucket_mb": 1, "sync.verify": True})
    handles, received = nccl_engines(engines)
    gathered: Counter[str] = Counter()
    rank = parallel.place().rank
    waits: list[int] = []

    def wait_for_gpu() -> None:
        waits.append(Communicator.sent[rank])

    with nccl(), gathers(gathered), mock.patch.object(parallel, "synchronize", wait_for_gpu):
        sender = Sender(worker.chunks, worker.arch, worker.config, "nccl")
        sender.send(handles, version=1)
    sent = Communicator.sent[rank]
    expected = {name: tensor.clone() for name, tensor in worker.hf_tensors()}
    return dict(
        sent=sent,
        waits=waits,
        gathered=gathered["received"],
        received=sorted(Communicator.received.values()),
        is_equal=rank != 0 or all(same(of_engine, expected) for of_engine in received),
    )


def nccl_syncs(folder, layout: dict, lost: int, message: int, trouble: str) -> dict:
    """Two weight syncs to three engines, of which `lost` dies, fails or hangs in the first one, at
    a message; message 0: when the group forms. On rank 0: what became of them."""
    settings = {
        "sync.bucket_mb": 1,
        "sync.timeout_s": 3 if trouble == "hangs" else 60,
        "engine.health_timeout_s": 10,
    }
    worker = cases.make_worker(folder, layout, settings)
    place = parallel.place()
    engines, received = nccl_engines(3)
    with nccl():
        Communicator.trouble = cause(trouble, engines[lost], place.world + lost, message)
        sender = Sender(worker.chunks, worker.arch, worker.config, "nccl")
        started = time.monotonic()
        sender.send(engines, version=1)
        seconds = time.monotonic() - started
        expected = {name: tensor.clone() for name, tensor in worker.hf_tensors()}
        complete = [same(of_engine, expected) for of_engine in received]
        dead = [[engine.is_dead.is_set() for engine in engines]]
        versions = [engine.worker.version for engine in engines] if place.rank == 0 else []
        dist.broadcast_object_list(dead, src=0)
        left = [engine for engine, is_dead in zip(engines, dead[0]) if not is_dead]
        if left:
            sender.send(left, version=2)
    if place.rank != 0:
        return {}
    return dict(
        seconds=seconds,
        complete=complete,
        versions=versions,
        dead=dead[0],
        second=[engine.worker.version for engine in engines],
        groups=Communicator.sizes,
    )


def nccl_error(folder, layout: dict, message: int) -> str:
    """Of this rank, in a weight sync to one engine that fails at a message."""
    worker = cases.make_worker(folder, layout, {"sync.bucket_mb": 1})
    engines, _ = nccl_engines(1)
    with nccl():
        Communicator.trouble = cause("fails", engines[0], parallel.place().world, message)
        sender = Sender(worker.chunks, worker.arch, worker.config, "nccl")
        try:
            sender.send(engines, version=1)
        except SyncError as error:
            return str(error)
    return ""


def cause(trouble: str, engine: Engine, member: int, message: int) -> Callable[[int, int], None]:
    happened = threading.Event()

    def happen(at_member: int, at_message: int) -> None:
        if (at_member, at_message) != (member, message) or happened.is_set():
            return
        happened.set()
        if trouble == "fails":
            raise MemoryError("no memory for a layer")
        if trouble == "hangs":
            engine.is_dead.wait(100)  # until it is killed
        else:
            engine.die()
        raise ConnectionError("the process has ended")

    return happen
