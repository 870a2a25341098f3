"""Weights into and out of a running Megatron model, whatever its layout, by the tables of `convert.py`.

Loading needs no communication: each rank reads what it holds. Exporting goes bucket by bucket: of each bucket a rank
sends all it holds in one message.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megastep.distributed import parallel
from megastep.models.architecture import Architecture
from megastep.weights.mapping import Row, from_megatron, rows_of, to_megatron

# Transformer Engine's layers hold a norm inside the linear layer after it, and experts as numbered weights.
_TE_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), r"input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), r"pre_mlp_layernorm.weight"),
    (
        re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"),
        r"mlp.experts.local_experts.\2.\1.weight",
    ),
)


def named_rows(chunks: list, arch: Architecture) -> Iterator[tuple[Row, Tensor]]:
    """This rank's parameters, each with its row."""
    rows = rows_of(arch)
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            yield rows[global_name(name, chunk, arch)], param


def global_name(name: str, chunk, arch: Architecture) -> str:
    """A local parameter's name in the whole model: wrappers off, layer and expert counted from the first."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for pattern, canonical in _TE_NAMES:
        name = pattern.sub(canonical, name)
    while hasattr(chunk, "module"):
        chunk = chunk.module

    def global_layer(match):
        return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def global_expert(match):
        place = parallel.place()
        return f"local_experts.{place.expert * arch.experts.count // place.expert_size + int(match[1])}."

    name = re.sub(r"^decoder\.layers\.(\d+)\.", global_layer, name)
    return re.sub(r"local_experts\.(\d+)\.", global_expert, name)


def load_hf(chunks: list, arch: Architecture, read) -> None:
    """Fill this rank's parameters from `read(hf_name) -> tensor`. No communication."""
    place = parallel.place()
    with torch.no_grad():
        for row, param in named_rows(chunks, arch):
            cut, cuts = cut_of(row, place)
            param.copy_(to_megatron(row, read, arch, cut, cuts))


def export_hf(
    chunks: list, arch: Architecture, bucket_bytes: int = 1 << 28
) -> Iterator[tuple[str, Tensor]]:
    """The whole model as HF tensors, one at a time, on rank 0; every rank must run through the iterator.

    On the other ranks it yields nothing. Memory: one bucket.
    """
    for name, tensor in gathered_hf(chunks, arch, bucket_bytes):
        if parallel.place().rank == 0:
            yield name, tensor


def gathered_hf(
    chunks: list, arch: Architecture, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """The whole model as HF tensors, one at a time, on every rank.

    Each holder broadcasts its cuts of a bucket in one message.
    """
    local = local_cuts(chunks, arch)
    holders = find_holders(local)
    for bucket in buckets_of(arch, holders, bucket_bytes):
        cuts = _broadcast_cuts(bucket, local, holders)
        for row in bucket:
            yield from from_megatron(row, cuts[row.megatron], arch)


def local_cuts(chunks: list, arch: Architecture) -> dict[str, Tensor]:
    return {row.megatron: param.detach() for row, param in named_rows(chunks, arch)}


def cut_of(row: Row, place: parallel.Place) -> tuple[int, int]:
    return (
        (place.expert_tensor, place.expert_tensor_size)
        if row.is_expert
        else (place.tensor, place.tensor_size)
    )


@dataclass(frozen=True)
class Holder:
    """A rank that has some cut of a parameter."""

    rank: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes in a message: what comes after it must be aligned, whatever its type."""
        return -(-self.nbytes // 16) * 16


def find_holders(local: dict[str, Tensor]) -> dict[str, list[list[Holder]]]:
    """For every parameter and every cut of it, in order, the ranks that have it; a whole one counts as one cut."""
    place = parallel.place()
    everywhere: list = [None] * place.world
    dist.all_gather_object(
        everywhere, (place, {name: (p.shape, p.dtype) for name, p in local.items()})
    )
    holders: dict[str, dict[int, list[Holder]]] = {}
    for where, held in everywhere:
        for name, (shape, dtype) in held.items():
            cut = where.expert_tensor if ".local_experts." in name else where.tensor
            holders.setdefault(name, {}).setdefault(cut, []).append(
                Holder(where.rank, shape, dtype)
            )
    return {name: [cuts[cut] for cut in sorted(cuts)] for name, cuts in holders.items()}


def buckets_of(arch: Architecture, holders: dict, bucket_bytes: int) -> Iterator[list[Row]]:
    """The rows of the model in groups of at most so many bytes, in order of depth; a larger one is a group."""
    bucket: list[Row] = []
    size = 0
    for name, row in rows_of(arch).items():
        if row.is_copy:
            continue
        nbytes = sum(cut[0].nbytes for cut in holders_needed(row, holders))
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(row)
        size += nbytes
    yield bucket


def holders_needed(row: Row, holders: dict) -> list[list[Holder]]:
    """Of each cut that makes up the parameter, the ranks that have it. A parameter that is not cut is the same on
    every tensor-parallel rank: one cut, which all of them have."""
    cuts = holders[row.megatron]
    return cuts if row.form.axis is not None else [[holder for cut in cuts for holder in cut]]


def _broadcast_cuts(
    bucket: list[Row], local: dict[str, Tensor], holders: dict
) -> dict[str, list[Tensor]]:
    """Every cut of the bucket, on every rank."""
    me = parallel.place().rank
    cuts: dict[str, list] = {
        row.megatron: [None] * len(holders_needed(row, holders)) for row in bucket
    }
    of_rank: dict[int, list[tuple[str, int, Holder]]] = {}
    for row in bucket:
        for index, (holder, *_) in enumerate(holders_needed(row, holders)):
            of_rank.setdefault(holder.rank, []).append((row.megatron, index, holder))
    for rank, items in sorted(of_rank.items()):
        message = torch.empty(
            sum(holder.room for _, _, holder in items), dtype=torch.uint8, device=parallel.device()
        )
        parts = message.split([holder.room for _, _, holder in items])
        for (name, index, holder), part in zip(items, parts, strict=True):
            cuts[name][index] = part[: holder.nbytes].view(holder.dtype).view(holder.shape)
            if rank == me:
                cuts[name][index].copy_(local[name])
        dist.broadcast(message, src=rank)
    return cuts
