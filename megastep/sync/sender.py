"""Weight sync: the policy's weights, under any parallel layout, into every engine, without disk.

    shm    one node, no GPU needed: through shared memory, where every rank copies its shards
    nccl   disaggregated engines: every rank sends its shards; not run on a GPU yet
    ipc    colocated engines: each rank gathers the weights and hands over its GPU's memory; not run
           on a GPU yet

On every policy rank:

    sender = Sender(worker.chunks, worker.arch, config, backend="shm")
    for batches in rollouts:
        worker.update(batches)                          # optimizer step `worker.step`
        # the driver has paused the engines
        sender.send(engines, version=worker.step)       # collective
        # the driver resumes them: they sample with weight version `worker.step`

The weight version is the number of optimizer steps; every engine keeps its own. All transports send
bucket by bucket, in order of depth: vLLM completes a layer before it receives the next. Memory of a
rank: two buckets (shm, all ranks together), its part of one (nccl), or those of `gather_hf` and
vLLM's buffer of one (ipc). A tensor larger than `sync.bucket_mb` is a bucket.

An engine that dies, fails or hangs in a weight sync is dropped, and the others receive all weights.
With nccl it blocks them: the group is aborted, formed again without it, and the weights are sent
again.

Engines are Ray actors with the methods that `Engines` calls.
"""

import torch.distributed as dist

from megastep.config import Config
from megastep.distributed import parallel
from megastep.errors import SyncError
from megastep.models.architecture import Architecture
from megastep.sync.engines import Engines
from megastep.sync.ipc_transport import IpcTransport
from megastep.sync.nccl_transport import NcclTransport
from megastep.sync.shm_transport import ShmTransport

Transport = ShmTransport | NcclTransport | IpcTransport

_TRANSPORTS: dict[str, type[Transport]] = {
    "shm": ShmTransport,
    "nccl": NcclTransport,
    "ipc": IpcTransport,
}


class Sender:
    """One rank's side of the weight sync. Collective: every rank makes the same calls."""

    def __init__(self, chunks: list, arch: Architecture, config: Config, backend: str):
        self.chunks = chunks
        self.arch = arch
        self.config = config
        self.backend = backend
        self._transport: Transport | None = None
        self._engine_ids: list[str] | None = None  # that the transport is connected to

    def send(self, handles: list, version: int) -> None:
        """Send the current weights to every engine, which must be paused or not serving yet."""
        engines = Engines(handles, version, self.config.engine, self.config.sync.timeout_s)
        ids = [handle._actor_id.hex() for handle in handles]
        if self._transport is None or self._engine_ids != ids:
            if self._transport is not None:
                self._transport.close()
            connect = _TRANSPORTS[self.backend]
            self._transport = connect(self.chunks, self.arch, self.config, engines)
            self._engine_ids = ids
        sent = self._transport.send(engines)
        problem: list[str | None] = [None]
        if sent and parallel.place().rank == 0:
            problem[0] = _first_difference(sent, engines.call("received_checksums"))
        dist.broadcast_object_list(problem, src=0)
        if problem[0]:
            raise SyncError(problem[0])


def _first_difference(sent: dict[str, int], received: list[list[dict[str, int]]]) -> str | None:
    """A message for the first mismatch. received: by engine, then by worker."""
    for worker_sums in (sums for engine_sums in received for sums in engine_sums):
        for name in sorted(sent.keys() | worker_sums.keys()):
            if sent.get(name) != worker_sums.get(name):
                return f"sync.verify: checksum mismatch in tensor {name}"
    return None
