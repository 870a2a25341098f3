"""This rank's place in the parallel layout; the only module that reads Megatron's parallel state.

world = tensor × context × data × pipeline               for attention and dense layers
      = expert_tensor × expert × expert_data × pipeline  for experts
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megastep.config import RANKS_TIMEOUT_S, ParallelConfig
from megastep.distributed import cpu
from megastep.distributed.ports import listen


@dataclass(frozen=True)
class Place:
    """This rank's coordinates; each `_size` is the extent of the axis."""

    rank: int
    world: int
    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    virtual_size: int
    data: int
    data_size: int
    expert: int
    expert_size: int
    expert_tensor: int
    expert_tensor_size: int
    context: int
    context_size: int


def start(
    degrees: ParallelConfig,
    rank: int,
    world: int,
    address: str,
    listener: socket.socket | None = None,
    timeout_s: int = RANKS_TIMEOUT_S,
) -> None:
    """Join the process group and create Megatron's groups. nccl with CUDA, gloo without.

    Rank 0 may pass the socket that listens at `address` already.
    """
    on_cpu = cpu.install()
    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(
        "gloo" if on_cpu else "nccl",
        store=_store(address, rank, world, listener, timedelta(seconds=timeout_s)),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    _create_groups(degrees)


def _store(
    address: str, rank: int, world: int, listener: socket.socket | None, timeout: timedelta
) -> dist.Store:
    """The rendezvous store. Rank 0 listens at `address` only; torch would on every interface."""
    host, _, port = address.rpartition(":")
    if rank != 0:
        return dist.TCPStore(host, int(port), world, False, timeout)
    listener = listener or listen(host, int(port))
    fd = listener.detach()
    return dist.TCPStore(host, int(port), world, True, timeout, master_listen_fd=fd)


def _create_groups(degrees: ParallelConfig) -> None:
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tensor,
        pipeline_model_parallel_size=degrees.pipeline,
        virtual_pipeline_model_parallel_size=degrees.virtual if degrees.virtual > 1 else None,
        context_parallel_size=degrees.context,
        expert_model_parallel_size=degrees.expert,
        expert_tensor_parallel_size=degrees.expert_tensor_size,
        # Checkpoints gather optimizer state over them.
        create_gloo_process_groups=dist.get_backend() != "fake",
    )


@contextmanager
def alone() -> Iterator[None]:
    """A world of one rank, for the duration of the block."""
    cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _create_groups(ParallelConfig())
        yield
    finally:
        stop()


@contextmanager
def imagined(degrees: ParallelConfig, rank: int, world: int) -> Iterator[None]:
    """One rank of a world without other processes, for shapes: collectives do nothing."""
    # Registers the "fake" backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    cpu.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        _create_groups(degrees)
        yield
    finally:
        stop()


def stop() -> None:
    if mpu.is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """One seed per pipeline stage; Megatron derives those of the tensor-parallel ranks."""
    stage_seed = seed + 100 * mpu.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def place() -> Place:
    return Place(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tensor=mpu.get_tensor_model_parallel_rank(),
        tensor_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline=mpu.get_pipeline_model_parallel_rank(),
        pipeline_size=mpu.get_pipeline_model_parallel_world_size(),
        virtual_size=mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        data=mpu.get_data_parallel_rank(),
        data_size=mpu.get_data_parallel_world_size(),
        expert=mpu.get_expert_model_parallel_rank(),
        expert_size=mpu.get_expert_model_parallel_world_size(),
        expert_tensor=mpu.get_expert_tensor_parallel_rank(),
        expert_tensor_size=mpu.get_expert_tensor_parallel_world_size(),
        context=mpu.get_context_parallel_rank(),
        context_size=mpu.get_context_parallel_world_size(),
    )


def sequence_shard(column: np.ndarray) -> np.ndarray:
    """This rank's shard of a column of tokens under sequence parallelism."""
    tensor = mpu.get_tensor_model_parallel_rank()
    tokens = len(column) // mpu.get_tensor_model_parallel_world_size()
    return column[tensor * tokens : (tensor + 1) * tokens]


def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def use(device: torch.device) -> None:
    """Make it the current device of this thread: torch has one per thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize() -> None:
    """Wait for all streams of this rank's GPU; a CPU has none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def has_embedding(virtual_stage: int) -> bool:
    return mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)


def has_head(virtual_stage: int) -> bool:
    return mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)


def groups() -> ProcessGroupCollection:
    """All of Megatron's groups, for its functions that take them as an argument."""
    return ProcessGroupCollection.use_mpu_process_groups()


def data_group():
    return mpu.get_data_parallel_group(with_context_parallel=True)


def tensor_group():
    return mpu.get_tensor_model_parallel_group()


def context_group():
    return mpu.get_context_parallel_group()
