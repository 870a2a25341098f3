"""Which rank sends what in a weight sync: its own shards, in place of a gather.

Every shard of a parameter is sent once. Of the ranks that hold it, that one sends it which has the
fewest bytes so far, so that replicas divide the work.

Example: tensor parallelism 2, data parallelism 2; ranks 0 and 2 hold the first half of a matrix,
ranks 1 and 3 the second.

    parameter     shards                       sent by
    linear_qkv    column-parallel: 2           ranks 0 and 1
    linear_proj   row-parallel: 2              ranks 2 and 3
    norm          replicated on all ranks: 1   rank 0
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megastep.distributed import parallel
from megastep.models.architecture import Architecture
from megastep.sync.checksum import add, checksum
from megastep.weights.mapping import HFSlice, ParamMapping, hf_slices, param_mappings
from megastep.weights.megatron import Holder, Holders, buckets_of, shard_holders


@dataclass(frozen=True)
class Share:
    """A shard of a parameter, and the rank that sends it."""

    mapping: ParamMapping
    shard: int
    holder: Holder

    def slices(self, arch: Architecture, local: Tensor | None = None) -> Iterator[HFSlice]:
        """As parts of HF tensors. local: the shard; by default without data, for shapes."""
        if local is None:
            local = torch.empty(self.holder.shape, dtype=self.holder.dtype, device="meta")
        return hf_slices(self.mapping, local, arch, self.shard)


def divide(arch: Architecture, holders: Holders, bucket_bytes: int) -> list[list[Share]]:
    """The shares of every bucket, in order of depth."""
    sent: Counter[int] = Counter()  # bytes by rank
    buckets = buckets_of(_in_turns(arch, holders), holders, bucket_bytes)
    return [_divide(bucket, holders, sent) for bucket in buckets]


def _in_turns(arch: Architecture, holders: Holders) -> Iterator[ParamMapping]:
    """All parameters in order of depth; a layer's experts in turns of the ranks that hold them.

    So every bucket has parts of all of these ranks, which send at the same time.
    """
    mappings = [mapping for mapping in param_mappings(arch).values() if not mapping.is_copy]
    for _, of_layer in itertools.groupby(mappings, key=lambda m: m.megatron.split(".experts.")[0]):
        turns: Counter[int] = Counter()  # parameters so far, by rank
        ordered: list[tuple[int, int, ParamMapping]] = []
        for mapping in of_layer:
            rank = holders[mapping.megatron][0][0].rank
            ordered.append((turns[rank], len(ordered), mapping))
            turns[rank] += 1
        yield from (mapping for _, _, mapping in sorted(ordered, key=lambda item: item[:2]))


def _divide(bucket: list[ParamMapping], holders: Holders, sent: Counter[int]) -> list[Share]:
    shards = [
        (mapping, shard, replicas)
        for mapping in bucket
        for shard, replicas in enumerate(shard_holders(mapping, holders))
    ]
    chosen: dict[int, Holder] = {}
    # First those that only one rank holds: the others then make up for differences.
    for index in sorted(range(len(shards)), key=lambda index: len(shards[index][2])):
        replicas = shards[index][2]
        holder = min(replicas, key=lambda replica: (sent[replica.rank], replica.rank))
        sent[holder.rank] += holder.nbytes
        chosen[index] = holder
    return [
        Share(mapping, shard, chosen[index]) for index, (mapping, shard, _) in enumerate(shards)
    ]


def bytes_by_rank(shares: list[Share], arch: Architecture) -> Counter[int]:
    """What each rank sends of a bucket; vocabulary padding is not sent."""
    sent: Counter[int] = Counter()
    for share in shares:
        sent[share.holder.rank] += sum(part.tensor.nbytes for part in share.slices(arch))
    return sent


# ---------------------------------------------------------------- checksums


def add_checksum(sums: dict[str, int], part: HFSlice, shape: tuple[int, ...]) -> None:
    """Add the term of a part to that of its HF tensor, which has this shape."""
    columns = torch.Size(shape[1:]).numel()
    term = checksum(part.tensor, part.offset, columns)
    sums[part.name] = add(sums.get(part.name, 0), term)


def sum_over_ranks(sums: dict[str, int]) -> dict[str, int]:
    """The checksums of whole tensors. Collective."""
    gathered: list = [None] * parallel.place().world
    dist.all_gather_object(gathered, sums)
    total: dict[str, int] = {}
    for rank_sums in gathered:
        for name, term in rank_sums.items():
            total[name] = add(total.get(name, 0), term)
    return total
