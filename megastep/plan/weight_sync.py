"""A weight sync: GPU memory beyond what the policy and the engine hold anyway, and traffic.

    policy rank     nccl    its part of a bucket
                    ipc     two buckets of `gather_hf`, and vLLM's send buffer
    engine GPU      vLLM's reload keeps the HF tensors of a module until it has all of them, then
                    builds its shard a second time; with nccl also a bucket as it arrives and as
                    HF tensors, which may belong to other modules

The largest module is a layer's experts: 4.5 GiB for Qwen3-235B-A22B, whatever the parallelism.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megastep.config import Config, ParallelConfig
from megastep.models.architecture import Architecture
from megastep.plan.model_states import ModelStates
from megastep.policy.model import PRECISIONS
from megastep.sync.shares import bytes_by_rank, divide
from megastep.weights.mapping import ParamMapping, param_mappings, to_megatron
from megastep.weights.megatron import Holder, Holders, shard_holders

GPUS_PER_NODE = 8  # that NVLink connects
# Nominal bytes per second, in one direction.
NETWORK = 50e9  # of a GPU's adapter, 400 Gb/s
NVLINK = 450e9


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class SyncMemory:
    largest_tensor: int  # in HF's format
    buffer: int  # the largest; shm has none
    rank: int
    engine: int


def sync_memory(config: Config, arch: Architecture) -> SyncMemory:
    itemsize = PRECISIONS[config.policy.precision].itemsize
    mappings = [mapping for mapping in param_mappings(arch).values() if not mapping.is_copy]
    tensors = [torch.Size(shape).numel() * itemsize for m in mappings for _, shape in m.hf]
    bucket = max([config.sync.bucket_mb << 20, *(_nbytes(m, itemsize) for m in mappings)])
    module = _largest_module(mappings, itemsize)
    rebuilt = module // config.engine.tensor_parallel
    backend = _backend(config)
    if backend == "ipc":
        buffer = max(config.sync.bucket_mb << 20, *tensors)
        return SyncMemory(max(tensors), buffer, 2 * bucket + buffer, module + rebuilt)
    if backend == "nccl":
        return SyncMemory(max(tensors), bucket, bucket, module + rebuilt + 2 * bucket)
    return SyncMemory(max(tensors), 0, 0, rebuilt)  # shm: everything else is in CPU memory


def _backend(config: Config) -> str:
    return config.sync.backend_for(has_gpu=True, colocate=config.cluster.colocate)


def _nbytes(mapping: ParamMapping, itemsize: int) -> int:
    return sum(torch.Size(shape).numel() for _, shape in mapping.hf) * itemsize


def _largest_module(mappings: list[ParamMapping], itemsize: int) -> int:
    """Megatron's parameters are vLLM's modules, except that a layer's experts are one."""
    sizes: Counter[str] = Counter()
    for mapping in mappings:
        module = mapping.megatron.partition(".local_experts.")[0]
        sizes[module] += _nbytes(mapping, itemsize)
    return max(sizes.values())


# ---------------------------------------------------------------- traffic


@dataclass(frozen=True)
class Traffic:
    """Bytes of one weight sync, and how long the slowest links take at their nominal rates."""

    sent: list[int]  # by rank
    gathered: list[int]  # by rank: received from other ranks
    by_worker: int  # received by each worker of an engine
    seconds: float


def sync_traffic(config: Config, arch: Architecture, stages: list[ModelStates]) -> Traffic:
    """As `sync/` sends it: each rank its share of a bucket, or by `gather_hf` for ipc."""
    holders = planned_holders(config, arch, stages)
    ranks = range(config.policy.ranks)
    divided = divide(arch, holders, config.sync.bucket_mb << 20)
    buckets = [bytes_by_rank(shares, arch) for shares in divided]
    model = sum(bucket.total() for bucket in buckets)
    if _backend(config) == "ipc":
        sent = _broadcast_by_rank(arch, holders)
        gathered = [sent.total() - sent[rank] for rank in ranks]
        return Traffic([sent[r] for r in ranks], gathered, model, max(gathered) / _rate(len(ranks)))
    workers = config.engine.num_engines * config.engine.tensor_parallel
    # One bucket after the other: from the ranks to the workers, then among the workers.
    most = [max(bucket.total() / workers, *bucket.values()) for bucket in buckets]
    seconds = sum(most) / NETWORK + model / _rate(workers)
    sent = sum(buckets, Counter())
    return Traffic([sent[rank] for rank in ranks], [0 for _ in ranks], model, seconds)


def _rate(gpus: int) -> float:
    """Of a collective of so many GPUs: on one node, or through all adapters of each."""
    return NVLINK if gpus <= GPUS_PER_NODE else GPUS_PER_NODE * NETWORK


def _broadcast_by_rank(arch: Architecture, holders: Holders) -> Counter[int]:
    """The bytes of `gather_hf`: each shard is sent by the first rank that holds it."""
    sent: Counter[int] = Counter()
    for mapping in param_mappings(arch).values():
        if not mapping.is_copy:
            for replicas in shard_holders(mapping, holders):
                sent[replicas[0].rank] += replicas[0].padded_nbytes
    return sent


def planned_holders(config: Config, arch: Architecture, stages: list[ModelStates]) -> Holders:
    """`find_holders` without ranks: which of them will hold which shard."""
    degrees = config.policy.parallel
    per_stage = config.policy.ranks // degrees.pipeline
    dtype = PRECISIONS[config.policy.precision]
    holders: Holders = {}
    for mapping in param_mappings(arch).values():
        num_shards = degrees.expert_tensor_size if mapping.is_expert else degrees.tensor
        shape = _shard_shape(mapping.sharding, mapping.hf, arch, num_shards)
        shards: list[list[Holder]] = [[] for _ in range(num_shards)]
        for stage in _stages_of(mapping, stages):
            for rank in range(per_stage):
                if mapping.is_expert and _expert(rank, degrees) != _home(mapping, arch, degrees):
                    continue
                holder = Holder(stage * per_stage + rank, shape, dtype)
                shards[rank % num_shards].append(holder)
        holders[mapping.megatron] = shards
    return holders


def _expert(rank: int, degrees: ParallelConfig) -> int:
    """Megatron numbers tensor-parallel ranks first, then expert-parallel ones."""
    return rank // degrees.expert_tensor_size % degrees.expert


def _home(mapping: ParamMapping, arch: Architecture, degrees: ParallelConfig) -> int:
    """The expert-parallel rank that holds an expert."""
    assert arch.experts is not None
    number = int(re.findall(r"local_experts\.(\d+)\.", mapping.megatron)[0])
    return number * degrees.expert // arch.experts.count


def _stages_of(mapping: ParamMapping, stages: list[ModelStates]) -> Iterator[int]:
    layer = re.match(r"decoder\.layers\.(\d+)\.", mapping.megatron)
    for number, stage in enumerate(stages):
        if layer is not None:
            chunks = zip(stage.first_layer, stage.layers, strict=True)
            holds = any(first <= int(layer[1]) < first + count for first, count in chunks)
        elif mapping.megatron.startswith("embedding."):
            holds = stage.has_embedding
        else:
            holds = stage.has_head
        if holds:
            yield number


@functools.cache
def _shard_shape(sharding, hf: tuple, arch: Architecture, num_shards: int) -> torch.Size:
    mapping = ParamMapping("", sharding, hf, is_expert=False, is_copy=False)
    shapes = dict(hf)
    local = to_megatron(
        mapping, lambda name: torch.empty(shapes[name], device="meta"), arch, 0, num_shards
    )
    return local.shape
