"""What each rank holds all the time: its model is built on the meta device, its buffers are laid out as Megatron does.

    weights     in the policy's precision, in one buffer
    gradients   fp32, a buffer of the same length
    optimizer   Adam's two moments, and with bf16 an fp32 copy of the weights: this data-parallel rank's part

Experts have buffers of their own, spread over the ranks that hold the same experts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from megastep.config import Config
from megastep.distributed import parallel
from megastep.models.architecture import Architecture
from megastep.policy.model import PRECISIONS, build_model

PARAM_ALIGN, BUCKET_ALIGN = 64, 128  # elements; Megatron's param_and_grad_buffer.py


@dataclass(frozen=True)
class Share:
    """Of the ranks of one pipeline stage."""

    layers: tuple[int, ...]  # how many each of its chunks has: one, or one per virtual stage
    first_layer: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    parameters: int
    owned: int  # of them by the optimizer of one rank: the largest part of any data-parallel rank
    weights: int  # bytes, as all below
    gradients: int
    optimizer: int
    largest_weight: int  # of its layers; the gradient exists once more while it is computed


@dataclass(frozen=True)
class Param:
    elements: int
    expert: bool
    own_bucket: bool  # Megatron keeps a tied embedding apart
    in_layer: bool


def shares(config: Config, arch: Architecture) -> list[Share]:
    """By pipeline stage. Tensor and data-parallel ranks of a stage are alike, but for their part of the optimizer."""
    p = config.policy.parallel
    # Data parallelism changes no shape: a world without it is imagined, however many ranks there are.
    per_stage = math.lcm(p.tensor * p.context, p.expert * p.expert_tensor_size)
    world = per_stage * p.pipeline
    return [_share(config, arch, rank, world) for rank in range(0, world, per_stage)]


def _share(config: Config, arch: Architecture, rank: int, world: int) -> Share:
    layout = config.policy.parallel
    with parallel.imagined(layout, rank, world):
        with torch.device("meta"):
            # Neither recomputing nor offloading activations changes what is held, and both may ask for a GPU.
            chunks = build_model(
                arch, replace(config.policy, recompute=[], activation_offload_layers=0)
            )
        chunk_params = [list(_params(chunk)) for chunk in chunks]
        virtual = range(layout.virtual)
        has_embedding, has_head = (
            any(map(has, virtual)) for has in (parallel.has_embedding, parallel.has_head)
        )
    of_stage = config.policy.ranks // layout.pipeline
    expert_ranks = of_stage // (layout.expert * layout.expert_tensor_size)
    dense_ranks = of_stage // layout.tensor
    buffers = [
        (list(params), expert_ranks if is_expert else dense_ranks)
        for of_chunk in chunk_params
        for is_expert, params in groupby(
            sorted(of_chunk, key=lambda p: p.expert), key=lambda p: p.expert
        )
    ]
    size = PRECISIONS[config.policy.precision].itemsize
    elements = sum(bucket.length for params, ranks in buffers for bucket in _buckets(params, ranks))
    owned = sum(
        max(bucket.owned(part, ranks) for part in range(ranks))
        for params, ranks in buffers
        for bucket in _buckets(params, ranks)
    )
    params = [p for of_chunk in chunk_params for p in of_chunk]
    return Share(
        layers=tuple(len(chunk.decoder.layers) for chunk in chunks),
        first_layer=tuple(chunk.decoder.layers[0].layer_number - 1 for chunk in chunks),
        has_embedding=has_embedding,
        has_head=has_head,
        parameters=sum(p.elements for p in params),
        owned=owned,
        weights=elements * size,
        gradients=elements * 4,
        optimizer=owned * (12 if size == 2 else 8),  # fp32 weights are their own master copy
        largest_weight=max(p.elements for p in params if p.in_layer) * size,
    )


def _params(chunk) -> Iterator[Param]:
    for name, param in chunk.named_parameters():
        tied, expert = (
            getattr(param, "shared_embedding", False),
            not getattr(param, "allreduce", True),
        )
        yield Param(param.numel(), expert, own_bucket=tied, in_layer=".layers." in name)


# ---------------------------------------------------------------- buffers


@dataclass(frozen=True)
class Bucket:
    """A stretch of a buffer, which the data-parallel ranks share out in equal parts."""

    spans: list[tuple[int, int]]  # of its parameters
    length: int  # with padding

    def owned(self, part: int, parts: int) -> int:
        """Elements of parameters in a part; padding needs no optimizer state."""
        first, last = self.length // parts * part, self.length // parts * (part + 1)
        return sum(max(min(stop, last) - max(start, first), 0) for start, stop in self.spans)


def _buckets(params: list[Param], ranks: int) -> Iterator[Bucket]:
    """Megatron fills a buffer from the last parameter to the first."""
    for own_bucket, run in groupby(reversed(params), key=lambda p: p.own_bucket):
        spans, end = [], 0
        for param in run:
            start = _pad(end, PARAM_ALIGN)
            end = start + param.elements
            spans.append((start, end))
        yield Bucket(spans, _pad(end, math.lcm(ranks, BUCKET_ALIGN)))


def _pad(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
