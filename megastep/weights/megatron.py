"""Weights into and out of a live Megatron model under any parallel layout, by `mapping.py`.

Loading needs no communication: each rank reads the tensors of its own shards. Export works bucket
by bucket: each rank broadcasts its shards of a bucket in one message.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megastep.distributed import parallel
from megastep.models.architecture import Architecture
from megastep.weights.mapping import ParamMapping, from_megatron, param_mappings, to_megatron

# Transformer Engine's linear layers include the norm before them; its experts are numbered weights.
_TE_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), r"input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), r"pre_mlp_layernorm.weight"),
    (
        re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"),
        r"mlp.experts.local_experts.\2.\1.weight",
    ),
)


def mapped_params(chunks: list, arch: Architecture) -> Iterator[tuple[ParamMapping, Tensor]]:
    """This rank's parameters with their mappings."""
    mappings = param_mappings(arch)
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            yield mappings[global_name(name, chunk, arch)], param


def global_name(name: str, chunk, arch: Architecture) -> str:
    """A local parameter's name in the whole model: no wrappers, global layer and expert numbers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for pattern, canonical in _TE_NAMES:
        name = pattern.sub(canonical, name)
    while hasattr(chunk, "module"):
        chunk = chunk.module

    def global_layer(match: re.Match) -> str:
        return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def global_expert(match: re.Match) -> str:
        assert arch.experts is not None
        place = parallel.place()
        first = place.expert * arch.experts.count // place.expert_size
        return f"local_experts.{first + int(match[1])}."

    name = re.sub(r"^decoder\.layers\.(\d+)\.", global_layer, name)
    return re.sub(r"local_experts\.(\d+)\.", global_expert, name)


def load_hf(chunks: list, arch: Architecture, read: Callable[[str], Tensor]) -> None:
    """Fill this rank's parameters from `read(hf_name) -> tensor`. No communication."""
    place = parallel.place()
    with torch.no_grad():
        for mapping, param in mapped_params(chunks, arch):
            shard, num_shards = shard_of(mapping, place)
            param.copy_(to_megatron(mapping, read, arch, shard, num_shards))


def export_hf(
    chunks: list, arch: Architecture, bucket_bytes: int = 1 << 28
) -> Iterator[tuple[str, Tensor]]:
    """The whole model as HF tensors, one at a time, on rank 0; other ranks yield nothing.

    Collective: every rank must exhaust the iterator. Memory: two buckets.
    """
    for name, tensor in gather_hf(chunks, arch, bucket_bytes):
        if parallel.place().rank == 0:
            yield name, tensor


def gather_hf(chunks: list, arch: Architecture, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """The whole model as HF tensors, one at a time, on every rank. Collective.

    The caller may read on any CUDA stream: all work of a bucket is complete before its first tensor
    is read, and all reads are before its memory is released. Memory: two buckets, one of shards and
    one of HF tensors.
    """
    local = local_shards(chunks, arch)
    holders = find_holders(local)
    parallel.synchronize()  # the optimizer wrote the weights on its own stream
    for bucket in buckets_of(param_mappings(arch).values(), holders, bucket_bytes):
        tensors = _gather_bucket(bucket, local, holders, arch)
        parallel.synchronize()
        yield from tensors
        parallel.synchronize()
        tensors.clear()


def local_shards(chunks: list, arch: Architecture) -> dict[str, Tensor]:
    return {mapping.megatron: param.detach() for mapping, param in mapped_params(chunks, arch)}


def shard_of(mapping: ParamMapping, place: parallel.Place) -> tuple[int, int]:
    """Index and number of the tensor-parallel shards."""
    if mapping.is_expert:
        return place.expert_tensor, place.expert_tensor_size
    return place.tensor, place.tensor_size


# ---------------------------------------------------------------- which rank holds which shard


@dataclass(frozen=True)
class Holder:
    """A rank that holds a given shard of a parameter."""

    rank: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def padded_nbytes(self) -> int:
        """Bytes in a message, where every shard is aligned for any dtype."""
        return -(-self.nbytes // 16) * 16


Holders = dict[str, list[list[Holder]]]  # by parameter, then by shard: its replicas


def find_holders(local: dict[str, Tensor]) -> Holders:
    """For every parameter, for each of its shards in order, the ranks that hold it. Collective."""
    place = parallel.place()
    metadata = {name: (param.shape, param.dtype) for name, param in local.items()}
    gathered: list = [None] * place.world
    dist.all_gather_object(gathered, (place, metadata))
    holders: dict[str, dict[int, list[Holder]]] = {}
    for where, held in gathered:
        for name, (shape, dtype) in held.items():
            shard = where.expert_tensor if ".local_experts." in name else where.tensor
            replicas = holders.setdefault(name, {}).setdefault(shard, [])
            replicas.append(Holder(where.rank, shape, dtype))
    return {name: [shards[i] for i in sorted(shards)] for name, shards in holders.items()}


def shard_holders(mapping: ParamMapping, holders: Holders) -> list[list[Holder]]:
    """For each shard that makes up the parameter, the ranks that hold it.

    A replicated parameter is one shard, held by every tensor-parallel rank.
    """
    shards = holders[mapping.megatron]
    if mapping.sharding.axis is not None:
        return shards
    return [[holder for replicas in shards for holder in replicas]]


def buckets_of(
    mappings: Iterable[ParamMapping], holders: Holders, bucket_bytes: int
) -> Iterator[list[ParamMapping]]:
    """Consecutive parameters in buckets of at most `bucket_bytes`; a larger one is alone."""
    bucket: list[ParamMapping] = []
    size = 0
    for mapping in mappings:
        if mapping.is_copy:
            continue
        nbytes = sum(replicas[0].nbytes for replicas in shard_holders(mapping, holders))
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket = []
            size = 0
        bucket.append(mapping)
        size += nbytes
    yield bucket


# ---------------------------------------------------------------- broadcast


@dataclass(frozen=True)
class _Part:
    """A shard as a part of its holder's message."""

    name: str
    shard: int
    holder: Holder


def _gather_bucket(
    bucket: list[ParamMapping], local: dict[str, Tensor], holders: Holders, arch: Architecture
) -> list[tuple[str, Tensor]]:
    shards = _broadcast_shards(bucket, local, holders)
    return [
        pair
        for mapping in bucket
        for pair in from_megatron(mapping, shards[mapping.megatron], arch)
    ]


def _broadcast_shards(
    bucket: list[ParamMapping], local: dict[str, Tensor], holders: Holders
) -> dict[str, list[Tensor]]:
    """Every shard of the bucket, on every rank: one broadcast per sending rank.

    Example: a norm and an output projection under tensor parallelism 2, on ranks 0 and 1.

        parameter     shards                  sent by
        norm          replicated: 1           rank 0, the first holder
        linear_proj   row-parallel: 2         ranks 0 and 1

        message of rank 0:  norm │ padding to 16 bytes │ linear_proj, shard 0
        message of rank 1:  linear_proj, shard 1

    The shards returned are views of the messages.
    """
    rank = parallel.place().rank
    shards: dict[str, dict[int, Tensor]] = {mapping.megatron: {} for mapping in bucket}
    for sender, parts in sorted(_parts_by_sender(bucket, holders).items()):
        sizes = [part.holder.padded_nbytes for part in parts]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=parallel.device())  # [bytes]
        for part, chunk in zip(parts, message.split(sizes), strict=True):
            holder = part.holder
            shard = chunk[: holder.nbytes].view(holder.dtype).view(holder.shape)
            if sender == rank:
                shard.copy_(local[part.name])
            shards[part.name][part.shard] = shard
        dist.broadcast(message, src=sender)
    return {name: [by_index[i] for i in sorted(by_index)] for name, by_index in shards.items()}


def _parts_by_sender(bucket: list[ParamMapping], holders: Holders) -> dict[int, list[_Part]]:
    """Each shard once, sent by the first rank that holds it."""
    parts: dict[int, list[_Part]] = {}
    for mapping in bucket:
        for shard, replicas in enumerate(shard_holders(mapping, holders)):
            holder = replicas[0]
            parts.setdefault(holder.rank, []).append(_Part(mapping.megatron, shard, holder))
    return parts
