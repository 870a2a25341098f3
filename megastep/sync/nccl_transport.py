"""Disaggregated engines on GPUs: every rank sends its own shards over NCCL. Not run on a GPU yet.

    rank 0       calls the engines; aborts the group when one is lost
    all ranks    send their parts of each bucket, without a gather (nccl.py)

Why not vLLM's own trainers: `nccl` has one sender, to which all weights must be gathered, and its
bytes leave through one network adapter. `sharded_rdt` pulls shards, but needs NIXL, replaces
`load_weights` (and so `sync.verify`), and one dead engine stalls the others for its stall timeout.
`sparse_nccl` is for differences. With a communicator per sender, NCCL allows one of them at a time.
"""

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import RayTaskError

from megastep.config import Config
from megastep.distributed import parallel
from megastep.distributed.ports import listen
from megastep.errors import SyncError
from megastep.models.architecture import Architecture
from megastep.sync import nccl
from megastep.sync.engines import Engines
from megastep.sync.shares import Share, add_checksum, divide, sum_over_ranks
from megastep.weights.megatron import find_holders, local_shards


class NcclTransport:
    group: nccl.Group
    error: BaseException | None = None  # on rank 0: of the last engine

    def __init__(self, chunks: list, arch: Architecture, config: Config, engines: Engines):
        self.arch = arch
        self.settings = config.sync
        self.place = parallel.place()
        self.local = local_shards(chunks, arch)
        holders = find_holders(self.local)
        divided = divide(arch, holders, config.sync.bucket_mb << 20)
        self.buckets = [lay_out(shares, arch) for shares in divided]
        rank = self.place.rank
        self.own = [[s for s in shares if s.holder.rank == rank] for shares in divided]
        self._connect(engines)

    def send(self, engines: Engines) -> dict[str, int] | None:
        """Send to the engines that are left, until none is lost on the way. Collective."""
        sums = self._send_once(engines)
        while self._must_repeat(engines):
            engines.allow(self.settings.timeout_s)
            self._connect(engines)
            sums = self._send_once(engines)
        return sum_over_ranks(sums) if self.settings.verify else None

    def _send_once(self, engines: Engines) -> dict[str, int]:
        """Returns this rank's terms of the checksums."""
        sums: dict[str, int] = {}
        if self.communicator is None:
            return sums
        parallel.synchronize()  # the optimizer wrote the weights on its own stream
        with ThreadPoolExecutor(1) as executor:
            if self.place.rank == 0:
                engines.group = self.group
                loading = executor.submit(self._load, engines)
            with self.group.watched():
                for bucket, own in zip(self.buckets, self.own, strict=True):
                    self._send_bucket(bucket, own, sums)
                parallel.synchronize()
        if self.place.rank == 0:
            self.error = loading.exception()
        return sums

    def _load(self, engines: Engines) -> None:
        engines.start_weight_update()
        engines.update_weights({"buckets": [asdict(bucket) for bucket in self.buckets]})
        engines.finish_weight_update()

    def _send_bucket(self, bucket: nccl.Bucket, own: list[Share], sums: dict[str, int]) -> None:
        tensors = []
        for share in own:
            shapes = dict(share.mapping.hf)
            for part in share.slices(self.arch, self.local[share.mapping.megatron]):
                tensors.append(part.tensor)
                if self.settings.verify:
                    add_checksum(sums, part, shapes[part.name])
        start, end = bucket.span(self.place.rank)
        if start < end:
            message = nccl.pack(tensors, end - start, parallel.device())
            nccl.send(self.communicator, message, bucket, self.place.world)

    def _must_repeat(self, engines: Engines) -> bool:
        """Whether the group was aborted and engines are left. The last one's error is raised on
        all ranks. Collective."""
        outcome: list = [self.group.is_aborted, False, None]
        if self.place.rank == 0:
            outcome[2] = self.error and str(self.error)
            if self.group.is_aborted and not self.error:
                engines.group = None
                engines.allow(engines.settings.health_timeout_s)
                engines.call("abandon_weight_update")
                outcome[1] = bool(engines.handles)
        dist.broadcast_object_list(outcome, src=0)
        is_aborted, has_engines, error = outcome
        if is_aborted:
            self.group.leave()
        if error is not None:
            raise SyncError(f"no engine could load the weights: {error}") from self.error
        return has_engines

    def _connect(self, engines: Engines) -> None:
        """Form the group. It is aborted if an engine is lost: `communicator` is then None."""
        world = self.place.world
        offer: list = [None]
        if self.place.rank == 0:
            host = ray.util.get_node_ip_address()
            listener = listen(host)
            port = listener.getsockname()[1]
            members = world + len(engines.handles) * engines.settings.tensor_parallel
            offer = [(host, port, members)]
            self.group = nccl.Group(host, port, 0, members, listener)
        dist.broadcast_object_list(offer, src=0)
        if self.place.rank == 0:
            joining = self._join()
            engines.group = self.group
            info = dict(address=host, port=port, members=members, ranks=world, first_worker=world)
            try:
                engines.init_weight_transfer_engine(info)
            except RayTaskError as error:
                self.error = error
        else:
            host, port, members = offer[0]
            self.group = nccl.Group(host, port, self.place.rank, members)
            joining = self._join()
        communicator = self.group.until_joined(joining)
        is_formed = [communicator is not None]
        dist.broadcast_object_list(is_formed, src=0)
        self.communicator: Any = communicator if is_formed[0] else None

    def _join(self) -> Future:
        """In a thread, which an abort leaves behind."""
        device = parallel.device()
        executor = ThreadPoolExecutor(1, initializer=parallel.use, initargs=(device,))
        joining = executor.submit(self.group.join, device)
        executor.shutdown(wait=False)
        return joining

    def close(self) -> None:
        """Workers leave when they join the next group."""
        self.group.leave()


def lay_out(shares: list[Share], arch: Architecture) -> nccl.Bucket:
    """The shares of a bucket in rank order."""
    parts = []
    spans = []
    end = 0
    ordered = sorted(shares, key=_rank)
    for rank, of_rank in itertools.groupby(ordered, key=_rank):
        start = end
        for share in of_rank:
            shapes = dict(share.mapping.hf)
            for part in share.slices(arch):
                tensor = part.tensor
                dtype = str(tensor.dtype).removeprefix("torch.")
                shape = list(shapes[part.name])
                parts.append([part.name, dtype, shape, list(tensor.shape), list(part.offset), end])
                end += nccl.padded(tensor.nbytes)
        if start < end:  # a shard may be vocabulary padding alone
            spans.append([rank, start, end])
    return nccl.Bucket(parts, spans)


def _rank(share: Share) -> int:
    return share.holder.rank
