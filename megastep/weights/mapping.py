"""Hugging Face tensors ↔ Megatron parameters.

A `Rule` (models/family.py) names the HF tensors of a Megatron parameter. Its `Sharding` joins them
into one logical tensor, which tensor parallelism splits evenly along a single axis. A rank's
parameter is its shard of the logical tensor, flattened:

    sharding         logical tensor                     split along   shard on each of n ranks
    Replicated       [..]                               –             [..]
    ColumnParallel   [out, in]                          0             [out/n, in]
    RowParallel      [out, in]                          1             [out, in/n]
    VocabParallel    [padded vocab, H]                  0             [padded/n, H]
    GateUp           [2, F, H]   gate, then up          1             [2·F/n, H]
    QKV              [groups, q heads + k + v, D, H]    0             [groups/n · (q+2) · D, H]

`param_mappings(arch)` expands a family's rules for every layer and expert. Loading and export of a
live model (`megatron.py`), checkpoint conversion (`conversion/offline.py`) and weight sync use it.
Invariants, held by the tests:

    every Megatron parameter has exactly one mapping, every HF tensor is in exactly one mapping
    (exception: the second copy of a tied embedding, on the last pipeline stage);
    HF → Megatron → HF is bit-exact under every parallel layout.

Why not `mbridge` 0.15: its tables name Transformer Engine's parameters only and its models use
Transformer Engine's layers, so it does not run on a CPU; it reads `rope_theta` from configs where
transformers 5 no longer has it; its tables are part of methods that use process groups, so they
work neither on the meta device nor on a checkpoint file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megastep.errors import WeightsError
from megastep.models.architecture import FAMILIES, Architecture
from megastep.models.family import Rule

# ---------------------------------------------------------------- shardings


class Sharding:
    """How HF tensors form a logical tensor, and how tensor parallelism splits it."""

    axis: int | None = None  # of the logical tensor, split by tensor parallelism
    hf_axis: int | None = None  # of each HF tensor, along which the shards lie

    def join(self, tensors: list[Tensor], arch: Architecture) -> Tensor:
        """The logical tensor of whole HF tensors."""
        return tensors[0]

    def split(self, logical: Tensor, arch: Architecture, start: int = 0) -> list[Tensor]:
        """The HF tensors, or their parts in a shard that starts at `start` of `axis`."""
        return [logical]

    def hf_start(self, start: int, shape: tuple[int, ...], arch: Architecture) -> int:
        """`start` of `axis` as a position on `hf_axis` of an HF tensor of this shape."""
        return start

    def flatten(self, shard: Tensor) -> Tensor:
        """A shard of the logical tensor as a rank's parameter."""
        return shard

    def unflatten(self, local: Tensor, arch: Architecture) -> Tensor:
        """A rank's parameter as a shard of the logical tensor."""
        return local


class Replicated(Sharding):
    """The same on every tensor-parallel rank."""


class ColumnParallel(Sharding):
    axis = hf_axis = 0


class RowParallel(Sharding):
    axis = hf_axis = 1


class VocabParallel(ColumnParallel):
    """Zero padding rows exist in Megatron only."""

    def join(self, tensors: list[Tensor], arch: Architecture) -> Tensor:
        padding = arch.padded_vocab - arch.vocab
        return torch.nn.functional.pad(tensors[0], (0, 0, 0, padding)) if padding else tensors[0]

    def split(self, logical: Tensor, arch: Architecture, start: int = 0) -> list[Tensor]:
        return [logical[: max(0, arch.vocab - start)]]


class GateUp(Sharding):
    """Gate and up projection of a gated MLP (or their biases), concatenated on every rank."""

    axis, hf_axis = 1, 0

    def join(self, tensors: list[Tensor], arch: Architecture) -> Tensor:
        return torch.stack(tensors)

    def split(self, logical: Tensor, arch: Architecture, start: int = 0) -> list[Tensor]:
        return list(logical)

    def flatten(self, shard: Tensor) -> Tensor:
        return shard.flatten(0, 1)

    def unflatten(self, local: Tensor, arch: Architecture) -> Tensor:
        return local.unflatten(0, (2, -1))


class QKV(Sharding):
    """Query groups interleaved: a group is its query heads, its key head and its value head."""

    axis = hf_axis = 0

    def join(self, tensors: list[Tensor], arch: Architecture) -> Tensor:
        grouped = [t.unflatten(0, (arch.kv_heads, -1, arch.head_dim)) for t in tensors]
        return torch.cat(grouped, dim=1)

    def split(self, logical: Tensor, arch: Architecture, start: int = 0) -> list[Tensor]:
        q_heads = arch.heads // arch.kv_heads
        return [t.flatten(0, 2) for t in logical.split([q_heads, 1, 1], dim=1)]

    def hf_start(self, start: int, shape: tuple[int, ...], arch: Architecture) -> int:
        return start * shape[0] // arch.kv_heads

    def flatten(self, shard: Tensor) -> Tensor:
        return shard.flatten(0, 2)

    def unflatten(self, local: Tensor, arch: Architecture) -> Tensor:
        return local.unflatten(0, (-1, arch.heads // arch.kv_heads + 2, arch.head_dim))


SHARDINGS: dict[str, Sharding] = {
    "replicated": Replicated(),
    "row_parallel": RowParallel(),
    "vocab_parallel": VocabParallel(),
    "gate_up": GateUp(),
    "qkv": QKV(),
}


# ---------------------------------------------------------------- parameters of a model


@dataclass(frozen=True)
class ParamMapping:
    """One Megatron parameter, by its name in the whole model, and its HF tensors."""

    megatron: str
    sharding: Sharding
    hf: tuple[tuple[str, tuple[int, ...]], ...]  # name, shape
    is_expert: bool
    is_copy: bool  # of a tensor that another mapping exports


def param_mappings(arch: Architecture) -> dict[str, ParamMapping]:
    """Every parameter of the model by its Megatron name, in order of depth."""
    mappings: dict[str, ParamMapping] = {}
    rules = [rule for rule in FAMILIES[arch.family].rules if _applies(rule, arch)]
    for rule in rules:
        if "{layer}" not in rule.megatron:
            _add(mappings, rule, arch)
    for layer in range(arch.layers):
        kinds = ("all", "moe" if arch.is_moe_layer(layer) else "dense")
        for rule in rules:
            if "{layer}" not in rule.megatron or rule.layers not in kinds:
                continue
            if "{expert}" not in rule.megatron:
                _add(mappings, rule, arch, layer)
                continue
            assert arch.experts is not None
            for expert in range(arch.experts.count):
                _add(mappings, rule, arch, layer, expert)
    return mappings


def _applies(rule: Rule, arch: Architecture) -> bool:
    flag = rule.when.removeprefix("!")
    return not flag or getattr(arch, flag) != rule.when.startswith("!")


def _add(
    mappings: dict[str, ParamMapping],
    rule: Rule,
    arch: Architecture,
    layer: int | None = None,
    expert: int | None = None,
) -> None:
    sizes = _sizes(arch)
    hf = []
    for template, symbols in rule.hf:
        shape = tuple(sizes[symbol] for symbol in symbols.split())
        hf.append((template.format(layer=layer, expert=expert), shape))
    name = rule.megatron.format(layer=layer, expert=expert)
    mappings[name] = ParamMapping(
        megatron=name,
        sharding=SHARDINGS[rule.sharding],
        hf=tuple(hf),
        is_expert=expert is not None,
        is_copy=rule.when == "tied",
    )


def _sizes(arch: Architecture) -> dict[str, int]:
    """The symbols of `Rule.hf`."""
    sizes = {
        "H": arch.hidden,
        "Q": arch.heads * arch.head_dim,
        "K": arch.kv_heads * arch.head_dim,
        "D": arch.head_dim,
        "F": arch.ffn_hidden,
        "V": arch.vocab,
    }
    if arch.experts is not None:
        sizes |= {"E": arch.experts.count, "X": arch.experts.hidden}
    return sizes


# ---------------------------------------------------------------- one parameter


def to_megatron(
    mapping: ParamMapping,
    read: Callable[[str], Tensor],
    arch: Architecture,
    shard: int = 0,
    num_shards: int = 1,
) -> Tensor:
    """Shard `shard` of `num_shards` as a Megatron parameter, from the tensors `read(hf_name)`."""
    tensors = []
    for name, shape in mapping.hf:
        tensor = read(name)
        check_shape(name, tensor.shape, shape)
        tensors.append(tensor)
    sharding = mapping.sharding
    logical = sharding.join(tensors, arch)
    if sharding.axis is not None:
        logical = logical.chunk(num_shards, dim=sharding.axis)[shard]
    return sharding.flatten(logical)


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != expected:
        raise WeightsError(
            f"tensor {name} has shape {list(found)}, by config.json it should have {list(expected)}"
        )


def from_megatron(
    mapping: ParamMapping, shards: list[Tensor], arch: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """The parameter's HF tensors with their names, from its shards in rank order."""
    sharding = mapping.sharding
    parts = [sharding.unflatten(shard, arch) for shard in shards]
    logical = torch.cat(parts, dim=sharding.axis) if len(parts) > 1 else parts[0]
    for (name, shape), tensor in zip(mapping.hf, sharding.split(logical, arch), strict=True):
        assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)} instead of {shape}"
        yield name, tensor.contiguous()


@dataclass(frozen=True)
class HFSlice:
    """The part of an HF tensor that one shard of a parameter holds, and its place there."""

    name: str
    tensor: Tensor
    offset: tuple[int, int]  # row, column

    def copy_into(self, whole: Tensor) -> None:
        target = whole
        for axis in range(whole.ndim):
            target = target.narrow(axis, self.offset[axis], self.tensor.shape[axis])
        target.copy_(self.tensor)


def hf_slices(
    mapping: ParamMapping, local: Tensor, arch: Architecture, shard: int = 0
) -> Iterator[HFSlice]:
    """A parameter's shard `shard`, held in `local`, as slices of HF tensors.

    Example: an output projection [H, Q] = [8, 6] is RowParallel, so shard 1 of 2 is [8, 3]. It is
    one slice, columns 3 to 5 of o_proj.weight: offset (0, 3).
    """
    sharding = mapping.sharding
    logical = sharding.unflatten(local, arch)
    start = 0 if sharding.axis is None else shard * logical.shape[sharding.axis]
    for (name, shape), tensor in zip(mapping.hf, sharding.split(logical, arch, start), strict=True):
        hf_start = sharding.hf_start(start, shape, arch)
        offset = (0, hf_start) if sharding.hf_axis == 1 else (hf_start, 0)
        if tensor.numel():  # a shard of vocabulary padding holds nothing
            yield HFSlice(name, tensor, offset)
