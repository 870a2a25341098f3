"""Weights for `model.init=random`: a random generator per tensor, seeded by (seed, HF name).

`megatron.load_hf` takes a `RandomWeights` in place of an HFReader: a rank draws each whole tensor
of its parameters, one at a time, and keeps its shard. The model is the same under every parallel
layout, on every machine, in every precision up to rounding, and no two parameters share numbers.

    norms                   1
    biases                  0
    projections into the    normal, standard deviation `initializer_range` / sqrt(2 × layers): two
    residual stream         per layer add up (GPT-2; also Megatron-LM's default)
    all other matrices      normal, standard deviation `initializer_range`

Left out: what transformers does beyond that for some families, such as scaling experts.
"""

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from megastep.models.architecture import Architecture
from megastep.weights.mapping import ParamMapping, RowParallel, param_mappings


class RandomWeights:
    """`weights(name)` returns one HF tensor, the same on every call."""

    def __init__(self, arch: Architecture, seed: int):
        self.seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stds: dict[str, float] = {}
        for mapping in param_mappings(arch).values():
            for name, shape in mapping.hf:
                self._shapes[name] = shape
                self._stds[name] = _std(mapping, arch)

    def __call__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)  # a norm
        values = _generator(self.seed, name).standard_normal(shape, np.float32)
        return torch.from_numpy(values).mul_(self._stds[name])


def _std(mapping: ParamMapping, arch: Architecture) -> float:
    # Row-parallel matrices are the projections into the residual stream.
    if isinstance(mapping.sharding, RowParallel):
        return arch.init_std / (2 * arch.layers) ** 0.5
    return arch.init_std


def _generator(seed: int, name: str) -> np.random.Generator:
    """numpy's: torch's numbers depend on the CPU's vector instructions."""
    key = blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
