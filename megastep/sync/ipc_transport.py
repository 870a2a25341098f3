"""Colocated engines on GPUs: each rank hands its GPU's memory to the engine there, by vLLM's `ipc`.

vLLM loads whole HF tensors, so every rank gathers the whole model, bucket by bucket (`gather_hf`):
it receives all shards but its own. Not run on a GPU yet.
"""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megastep.config import Config
from megastep.distributed import parallel
from megastep.models.architecture import Architecture
from megastep.sync.checksum import checksum
from megastep.sync.engines import Engines
from megastep.weights.mapping import param_mappings
from megastep.weights.megatron import find_holders, gather_hf, local_shards


class IpcTransport:
    """Engines map a buffer of the rank on their GPU."""

    def __init__(self, chunks: list, arch: Architecture, config: Config, engines: Engines):
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCTrainerInitInfo,
            IPCTrainerWeightTransferEngine,
        )

        self.source: Any = _source(chunks, arch, config)
        # vLLM rejects a tensor that is larger than the buffer.
        largest = max(math.prod(m.shape) * m.dtype.itemsize for m in self.source.metadata())
        info = IPCTrainerInitInfo(
            rank=parallel.place().rank,
            packed=True,
            packed_buffer_size_bytes=max(config.sync.bucket_mb << 20, largest),
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


def _source(chunks: list, arch: Architecture, config: Config) -> Any:
    """The model as vLLM's WeightSource; defined here because vLLM takes seconds to import."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class MegatronSource(WeightSource):
        """All methods are collective."""

        sums: dict[str, int] | None = None  # of the last iteration

        def metadata(self) -> list:
            holders = find_holders(local_shards(chunks, arch))
            return [
                ParamMeta(name, holders[mapping.megatron][0][0].dtype, shape)
                for mapping in param_mappings(arch).values()
                if not mapping.is_copy
                for name, shape in mapping.hf
            ]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            self.sums = {} if config.sync.verify else None
            for name, tensor in gather_hf(chunks, arch, config.sync.bucket_mb << 20):
                if self.sums is not None:
                    self.sums[name] = checksum(tensor)
                yield name, tensor

    return MegatronSource()
