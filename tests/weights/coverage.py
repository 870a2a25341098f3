"""Which parameters of a model its ranks hold, against the mapping."""

import torch

from megastep.config import PolicyConfig
from megastep.distributed import parallel
from megastep.models.architecture import Architecture
from megastep.policy.model import build_model
from megastep.weights.mapping import param_mappings, to_megatron
from megastep.weights.megatron import global_name, shard_of

Shards = dict[str, dict[int, torch.Size]]  # by parameter, then by shard


def count_mapped_parameters(
    arch: Architecture, policy: PolicyConfig, world: int, device: str
) -> int:
    """Elements of the whole model, vocabulary padding included; every rank is built on `device`.

    Checks that each parameter of each rank has exactly one mapping and the shape of its shard, and
    that the ranks hold every shard of every mapping.
    """
    mappings = param_mappings(arch)
    seen: Shards = {name: {} for name in mappings}
    for rank in range(world):
        with parallel.imagined(policy.parallel, rank, world), torch.device(device):
            _add_shards_of_rank(seen, arch, policy)
    degrees = policy.parallel
    total = 0
    for name, shards in seen.items():
        mapping = mappings[name]
        num_shards = degrees.expert_tensor_size if mapping.is_expert else degrees.tensor
        if mapping.is_copy and degrees.pipeline == 1:
            num_shards = 0  # the only stage shares the embedding itself
        assert sorted(shards) == list(range(num_shards)), name
        if not mapping.is_copy:
            held = shards.values() if mapping.sharding.axis is not None else [shards[0]]
            total += sum(shape.numel() for shape in held)
    return total


def _add_shards_of_rank(seen: Shards, arch: Architecture, policy: PolicyConfig) -> None:
    mappings = param_mappings(arch)
    shapes = {hf: shape for mapping in mappings.values() for hf, shape in mapping.hf}
    chunks = build_model(arch, policy)
    named = [(global_name(n, c, arch), p) for c in chunks for n, p in c.named_parameters()]
    assert len({name for name, _ in named}) == len(named)
    for name, param in named:
        mapping = mappings[name]  # KeyError: a parameter without a mapping
        shard, num_shards = shard_of(mapping, parallel.place())
        with torch.device("meta"):
            expected = to_megatron(
                mapping, lambda hf: torch.empty(shapes[hf]), arch, shard, num_shards
            )
        assert param.device.type == torch.get_default_device().type
        assert param.shape == expected.shape, name
        assert seen[name].setdefault(shard, param.shape) == param.shape
