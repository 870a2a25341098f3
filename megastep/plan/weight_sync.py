"""GPU memory of a weight sync, in bytes, beyond what the policy and the engine hold anyway.

    policy rank     two buckets of `gather_hf`, and vLLM's send buffers:
                        ipc     one, on every rank
                        nccl    two, on rank 0; a message ends with the tensor that exceeds it
    engine GPU      vLLM's reload keeps the HF tensors of a module until it has all of them, then
                    builds its shard a second time; with nccl also two messages

The largest module is a layer's experts: 4.5 GiB for Qwen3-235B-A22B, whatever the parallelism.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from megastep.config import Config
from megastep.models.architecture import Architecture
from megastep.policy.model import PRECISIONS
from megastep.weights.mapping import ParamMapping, param_mappings


@dataclass(frozen=True)
class SyncMemory:
    largest_tensor: int  # in HF's format
    buffer: int  # of vLLM's sender; shm has none
    every_rank: int
    rank_0: int
    engine: int


def sync_memory(config: Config, arch: Architecture) -> SyncMemory:
    itemsize = PRECISIONS[config.policy.precision].itemsize
    mappings = [mapping for mapping in param_mappings(arch).values() if not mapping.is_copy]
    tensors = [torch.Size(shape).numel() * itemsize for m in mappings for _, shape in m.hf]
    bucket = max([config.sync.bucket_mb << 20, *(_nbytes(m, itemsize) for m in mappings)])
    module = _largest_module(mappings, itemsize)
    rebuilt = module // config.engine.tensor_parallel
    backend = config.sync.backend_for(has_gpu=True, colocate=config.cluster.colocate)
    if backend == "ipc":
        buffer = max(config.sync.bucket_mb << 20, *tensors)
        gathered = 2 * bucket + buffer
        return SyncMemory(max(tensors), buffer, gathered, gathered, module + rebuilt)
    if backend == "nccl":
        messages = 2 * (bucket + max(tensors))
        return SyncMemory(
            max(tensors), bucket, 2 * bucket, 2 * bucket + messages, module + rebuilt + messages
        )
    return SyncMemory(max(tensors), 0, 0, 0, rebuilt)  # shm: everything else is in CPU memory


def _nbytes(mapping: ParamMapping, itemsize: int) -> int:
    return sum(torch.Size(shape).numel() for _, shape in mapping.hf) * itemsize


def _largest_module(mappings: list[ParamMapping], itemsize: int) -> int:
    """Megatron's parameters are vLLM's modules, except that a layer's experts are one."""
    sizes: Counter[str] = Counter()
    for mapping in mappings:
        module = mapping.megatron.partition(".local_experts.")[0]
        sizes[module] += _nbytes(mapping, itemsize)
    return max(sizes.values())
