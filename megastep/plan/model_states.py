"""Model states of each rank (ZeRO's term): weights, gradients and optimizer states, in bytes.

The rank's model is built on the meta device, its buffers are laid out as in Megatron:

    weights     in the policy's precision, in one buffer
    gradients   fp32, in a buffer of the same length
    optimizer   Adam's two moments, with bf16 also fp32 weights: this data-parallel rank's shard

Experts have separate buffers, sharded over the ranks that hold the same experts. Overlapped
communication (overlap_grad_reduce, overlap_param_gather) works in place: it only divides the
buffers of the first stage into buckets.

On CUDA Transformer Engine holds more per weight matrix of a layer:

    FP8 copies       with policy.fp8: the matrix by rows and by columns, with scales
    placeholders     with gradient_accumulation_fusion: one gradient that is never written for each
                     shape of a matrix
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megastep.config import Config
from megastep.distributed import parallel
from megastep.models.architecture import Architecture
from megastep.policy.megatron_settings import ddp_settings
from megastep.policy.model import PRECISIONS, build_model

# Elements; Megatron's param_and_grad_buffer.py.
PARAM_ALIGN = 64
BUCKET_ALIGN = 128
PADDED_BUCKET_ALIGN = 1 << 16  # with pad_buckets_for_high_nccl_busbw


@dataclass(frozen=True)
class ModelStates:
    """The model states of a rank of one pipeline stage."""

    layers: tuple[int, ...]  # in each of its chunks: one, or one per virtual stage
    first_layer: tuple[int, ...]  # of each chunk
    has_embedding: bool
    has_head: bool
    parameters: int
    optimizer_parameters: int  # in the largest optimizer shard of any data-parallel rank
    weights: int  # bytes, as all below
    gradients: int
    optimizer: int
    largest_weight: int  # of its layers; backward holds its gradient twice
    placeholders: int  # of fused gradients: one matrix of each shape
    fp8_copies: int


@dataclass(frozen=True)
class Param:
    elements: int
    is_expert: bool
    own_bucket: bool  # Megatron gives a tied embedding its own
    in_layer: bool
    matrix: tuple[int, ...] | None  # the shape, if Transformer Engine multiplies with it


@dataclass(frozen=True)
class Buffer:
    """Parameters in one Megatron buffer, whose optimizer states are sharded over `ranks`."""

    params: list[Param]
    ranks: int
    bucket_elements: int | None  # a bucket ends once it has that many; None: one bucket
    bucket_align: int


def model_states(config: Config, arch: Architecture) -> list[ModelStates]:
    """By pipeline stage; the ranks of a stage differ only in their optimizer shards."""
    p = config.policy.parallel
    # Data parallelism changes no shape: build the smallest world with these degrees.
    ranks_per_stage = math.lcm(p.tensor * p.context, p.expert * p.expert_tensor_size)
    world = ranks_per_stage * p.pipeline
    return [_of_rank(config, arch, rank, world) for rank in range(0, world, ranks_per_stage)]


def _of_rank(config: Config, arch: Architecture, rank: int, world: int) -> ModelStates:
    degrees = config.policy.parallel
    with parallel.imagined(degrees, rank, world):
        with torch.device("meta"):
            # These change no model states, but may require a GPU.
            policy = replace(
                config.policy, recompute=[], activation_offload_layers=0, fp8=None, megatron={}
            )
            chunks = build_model(arch, policy)
        chunk_params = [list(_params(chunk)) for chunk in chunks]
        has_embedding = any(parallel.has_embedding(stage) for stage in range(degrees.virtual))
        has_head = any(parallel.has_head(stage) for stage in range(degrees.virtual))
    elements = 0  # with padding
    owned = 0
    for buffer in _buffers(config, chunk_params, is_first_stage=rank == 0):
        for bucket in _buckets(buffer):
            elements += bucket.length
            owned += max(bucket.owned(part, buffer.ranks) for part in range(buffer.ranks))
    itemsize = PRECISIONS[config.policy.precision].itemsize
    params = [param for of_chunk in chunk_params for param in of_chunk]
    matrices = [param.matrix for param in params if param.matrix is not None]
    return ModelStates(
        layers=tuple(len(chunk.decoder.layers) for chunk in chunks),
        first_layer=tuple(chunk.decoder.layers[0].layer_number - 1 for chunk in chunks),
        has_embedding=has_embedding,
        has_head=has_head,
        parameters=sum(param.elements for param in params),
        optimizer_parameters=owned,
        weights=elements * itemsize,
        gradients=elements * 4,
        optimizer=owned * (12 if itemsize == 2 else 8),  # fp32 weights need no master copy
        largest_weight=max(param.elements for param in params if param.in_layer) * itemsize,
        placeholders=sum(map(math.prod, set(matrices))) * itemsize,
        fp8_copies=_fp8_copies(config, sum(map(math.prod, matrices))),
    )


def _fp8_copies(config: Config, elements: int) -> int:
    """Transformer Engine caches them over the micro-batches of an update, by default."""
    policy = config.policy
    if policy.fp8 is None or policy.megatron.get("disable_parameter_transpose_cache"):
        return 0
    # A scale per 32 elements of MXFP8; per 128 × 128, or per matrix, they are negligible.
    scales = elements // 32 if policy.fp8 == "mxfp8" else 0
    return 2 * (elements + scales)


def _params(chunk) -> Iterator[Param]:
    for name, param in chunk.named_parameters():
        yield Param(
            elements=param.numel(),
            is_expert=not getattr(param, "allreduce", True),
            own_bucket=getattr(param, "shared_embedding", False),
            in_layer=".layers." in name,
            matrix=tuple(param.shape) if _is_matrix(name, param) else None,
        )


def _is_matrix(name: str, param: torch.Tensor) -> bool:
    return ".layers." in name and ".router." not in name and param.dim() == 2


# ---------------------------------------------------------------- buffers


def _buffers(
    config: Config, chunk_params: list[list[Param]], is_first_stage: bool
) -> Iterator[Buffer]:
    """For each chunk of layers, the buffer of its dense parameters and that of its experts."""
    degrees = config.policy.parallel
    ranks_per_stage = config.policy.ranks // degrees.pipeline
    expert_ranks = ranks_per_stage // (degrees.expert * degrees.expert_tensor_size)
    dense_ranks = ranks_per_stage // degrees.tensor
    ddp = ddp_settings(config.policy, on_cuda=True)
    align = PADDED_BUCKET_ALIGN if ddp.get("pad_buckets_for_high_nccl_busbw") else BUCKET_ALIGN
    for number, params in enumerate(chunk_params):
        # Of other stages and chunks Megatron communicates each buffer at once.
        is_divided = ddp["overlap_grad_reduce"] and is_first_stage and number == 0
        bucket_elements = _bucket_elements(config, ddp) if is_divided else None
        dense = [param for param in params if not param.is_expert]
        experts = [param for param in params if param.is_expert]
        if dense:
            yield Buffer(dense, dense_ranks, bucket_elements, align)
        if experts:
            yield Buffer(experts, expert_ranks, bucket_elements, align)


def _bucket_elements(config: Config, ddp: dict) -> int:
    return ddp.get("bucket_size") or max(40_000_000, 1_000_000 * config.data_ranks)


@dataclass(frozen=True)
class Bucket:
    """A range of a buffer, sharded evenly over the data-parallel ranks."""

    spans: list[tuple[int, int]]  # of its parameters
    length: int  # with padding

    def owned(self, part: int, parts: int) -> int:
        """Elements of parameters in a shard; padding needs no optimizer state."""
        first = self.length // parts * part
        last = self.length // parts * (part + 1)
        return sum(max(min(stop, last) - max(start, first), 0) for start, stop in self.spans)


def _buckets(buffer: Buffer) -> Iterator[Bucket]:
    """Megatron fills a buffer from the last parameter to the first."""
    spans: list[tuple[int, int]] = []
    for param in reversed(buffer.params):
        if param.own_bucket and spans:
            yield _bucket(buffer, spans)
            spans = []
        start = _pad(spans[-1][1], PARAM_ALIGN) if spans else 0
        end = start + param.elements
        spans.append((start, end))
        is_full = buffer.bucket_elements is not None and end >= buffer.bucket_elements
        if param.own_bucket or is_full:
            yield _bucket(buffer, spans)
            spans = []
    if spans:
        yield _bucket(buffer, spans)


def _bucket(buffer: Buffer, spans: list[tuple[int, int]]) -> Bucket:
    return Bucket(spans, _pad(spans[-1][1], math.lcm(buffer.ranks, buffer.bucket_align)))


def _pad(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
