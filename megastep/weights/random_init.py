"""Weights for `model.init=random`: each tensor is drawn from a generator of its own, seeded by (seed, HF name).

`live.load_hf` takes a `FreshWeights` in the place of an HFReader, so a rank draws the whole tensors of what it holds,
one at a time, and keeps its shard. The model is the same under every parallel layout, on every kind of machine, in
every precision up to rounding, and no two parameters share their numbers.

    norms                   1
    biases                  0
    projections back into   normal, standard deviation `initializer_range` / sqrt(2 × layers): their outputs add up in
    the residual stream     the residual stream, two per layer (GPT-2; Megatron-LM's default too)
    all other matrices      normal, standard deviation `initializer_range`

Left out: what a family's own transformers code does beyond that, such as scaling experts.
"""

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from megastep.models.architecture import Architecture
from megastep.weights.mapping import Row, Rows, rows_of


class FreshWeights:
    """`fresh(name)` returns one HF tensor, always the same."""

    def __init__(self, arch: Architecture, seed: int):
        self.seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stds: dict[str, float] = {}
        for row in rows_of(arch).values():
            for name, shape in row.hf:
                self._shapes[name] = shape
                self._stds[name] = _std(row, arch)

    def __call__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)  # a norm
        drawn = _generator(self.seed, name).standard_normal(shape, np.float32)
        return torch.from_numpy(drawn).mul_(self._stds[name])


def _std(row: Row, arch: Architecture) -> float:
    # The matrices that tensor parallelism cuts by rows are the ones whose outputs go into the residual stream.
    return arch.init_std / (2 * arch.layers) ** 0.5 if isinstance(row.form, Rows) else arch.init_std


def _generator(seed: int, name: str) -> np.random.Generator:
    """numpy's, not torch's: torch draws other numbers on CPUs with other vector instructions."""
    key = blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
