"""Weights into and out of a running Megatron model, whatever its layout, by the tables of `convert.py`.

Loading needs no communication: each rank reads what it holds. Exporting brings one parameter at a time to rank 0.
"""

import re
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megastep.architecture import Architecture
from megastep.policy import parallel
from megastep.sync.convert import Row, from_megatron, rows_of, to_megatron

# Transformer Engine's layers hold a norm inside the linear layer after it, and experts as numbered weights.
_TE_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), r"input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), r"pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.\1.weight"),
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


def export_hf(chunks: list, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """The whole model as HF tensors, one at a time, on rank 0; every rank must run through the iterator.

    On the other ranks it yields nothing. Memory: one parameter.
    """
    place = parallel.place()
    local = {row.megatron: param.detach() for row, param in named_rows(chunks, arch)}
    holders = _holders(local, place)
    for name, row in rows_of(arch).items():
        if row.is_copy:
            continue
        cuts = [_bring_to_rank_0(local.get(name), *holder, place.rank) for holder in _needed(row, holders[name])]
        if place.rank == 0:
            yield from from_megatron(row, cuts, arch)


def _needed(row: Row, holders: list) -> list:
    return holders if row.form.axis is not None else holders[:1]


def cut_of(row: Row, place: parallel.Place) -> tuple[int, int]:
    return (place.expert_tensor, place.expert_tensor_size) if row.is_expert else (place.tensor, place.tensor_size)


def _holders(local: dict[str, Tensor], place: parallel.Place) -> dict[str, list]:
    """For every parameter the (rank, shape, dtype) of its cuts, in order; of replicas the first."""
    everywhere: list = [None] * place.world
    dist.all_gather_object(everywhere, (place, {name: (p.shape, p.dtype) for name, p in local.items()}))
    holders: dict[str, dict[int, tuple]] = {}
    for where, held in everywhere:
        for name, (shape, dtype) in held.items():
            cut = where.expert_tensor if ".local_experts." in name else where.tensor
            holders.setdefault(name, {}).setdefault(cut, (where.rank, shape, dtype))
    return {name: [cuts[cut] for cut in sorted(cuts)] for name, cuts in holders.items()}


def _bring_to_rank_0(tensor: Tensor | None, holder: int, shape, dtype, me: int) -> Tensor | None:
    if holder == 0:
        return tensor if me == 0 else None
    if me == holder:
        dist.send(tensor.contiguous(), dst=0)
    elif me == 0:
        tensor = torch.empty(shape, dtype=dtype, device=parallel.device())
        dist.recv(tensor, src=holder)
        return tensor
    return None
