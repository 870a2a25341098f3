"""Checkpoints: model, optimizer, schedule and random state through Megatron's dist_checkpointing.

    root/step_12.partial/    being written
    root/step_12/            complete: megastep.json was written last, then the folder was renamed
        megastep.json        step, parallel layout, model, size and SHA-256 of every file
        loop.json            the loop's state (loop_state.py)
        hf/                  config.json and tokenizer, so that an export needs no other folder
        *.distcp .metadata   tensors (torch_dist), independent of the parallel layout
        common.pt            schedule, optimizer settings

A killed save leaves a `.partial` folder, which is never read. `manifest.py` rejects damaged
checkpoints; `unpickle.py` reads pickles safely.

Random state is restored under the same parallel layout only: under another one the ranks start from
the config's seed.
"""

import contextlib
import logging
import multiprocessing
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import (
    DATA,
    HF,
    check_intact,
    check_same_model,
    data_files,
    describe,
    hash_files,
    read_manifest,
    whole_checkpoints,
    write_manifest,
)
from megastep.checkpoint.megatron_load import load_state
from megastep.distributed import parallel
from megastep.distributed.megatron_version import save_checkpoint
from megastep.distributed.processes import end_with_parent
from megastep.errors import CheckpointError
from megastep.weights.hf_files import copy_companions

_FORMAT_OPTIONS = {
    "non_homogeneous_layers": True,  # one key per layer, in every model family
    # Megatron's optimizer format that is independent of the parallel layout, gathered over gloo
    # instead of on the devices.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def _start_results_helper() -> None:
    """filesystem_async.py:51 keeps a helper process for the results of a save.

    Ours exits with its rank if that is killed. It is forked, as Megatron's writers are: spawned, it
    would import torch once more. A fork keeps the pages that its parent later overwrites: it must
    precede the model, or weights and optimizer state stay in memory twice. A daemonic process may
    have no children: there a save fails, and nothing else.
    """
    is_daemonic = multiprocessing.current_process().daemon
    if filesystem_async._results_queue is None and not is_daemonic:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start(initializer=end_with_parent)
        filesystem_async._results_queue = manager.Queue()
        filesystem_async._results_manager = manager  # exits when it is garbage-collected


class Saver:
    """Writes checkpoints, at most one in the background. Construct it before the model."""

    def __init__(self):
        _start_results_helper()
        self._queue: AsyncCallsQueue | None = None

    def save(
        self, root: str | Path, worker, loop: LoopState, keep: int, in_background: bool
    ) -> None:
        self.finish()
        final = Path(root) / f"step_{loop.step}"
        partial = final.with_suffix(".partial")
        _on_rank_0(lambda: _begin(partial, worker.config.model.path, loop))
        manifest = describe(worker.arch, loop.step, _parallel_layout(worker), with_optimizer=True)
        manifest["optimizer_steps"] = worker.step
        request = save_checkpoint(_state(worker, loading=False), partial, in_background)
        if request is None:
            seal(partial, final, manifest, keep, hashed=lambda: _hash_own(partial))
            return
        request, hashed = _with_hashing(request, partial)
        request.add_finalize_fn(lambda: seal(partial, final, manifest, keep, hashed))
        self._queue = AsyncCallsQueue()
        self._queue.schedule_async_request(request)

    def seal_written(self) -> None:
        """Complete a background save if all ranks have written their files; does not wait."""
        if self._queue is not None and self._queue.maybe_finalize_async_calls(blocking=False):
            self.finish()

    def finish(self) -> None:
        """Wait for the background save."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)
            self._queue.close()
            self._queue = None


def _parallel_layout(worker) -> dict:
    return {"ranks": dist.get_world_size(), **asdict(worker.config.policy.parallel)}


def _begin(partial: Path, model: str, loop: LoopState) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_companions(model, partial / HF)
    loop.write(partial)


def _hash_own(partial: Path) -> dict[str, str]:
    """Hash the files of this rank, which are still in its node's page cache."""
    names = [path.name for path in partial.glob(f"__{dist.get_rank()}_*{DATA}")]
    return hash_files(partial, names)


def _with_hashing(
    request: AsyncRequest, partial: Path
) -> tuple[AsyncRequest, Callable[[], dict[str, str]]]:
    """The request, whose process also hashes the files it wrote, and a function for the hashes.

    Hashing a gigabyte takes most of a second, in which the rank would not train.
    """
    # A rank writes two files: their hashes fit into the pipe's buffer.
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def write_and_hash(*arguments, **options) -> None:
        request.async_fn(*arguments, **options)
        # After an error the rank hashes again, and reports it to all ranks.
        with contextlib.suppress(OSError):
            sender.send(_hash_own(partial))

    def hashed() -> dict[str, str]:
        return receiver.recv() if receiver.poll() else _hash_own(partial)

    if request.async_fn is None:  # this rank has no tensors to write
        return request, dict
    return request._replace(async_fn=write_and_hash), hashed


def seal(
    partial: Path, final: Path, manifest: dict, keep: int, hashed: Callable[[], dict[str, str]]
) -> None:
    """After all ranks have written: write the manifest, rename the folder, remove old checkpoints.

    `hashed`: returns the hashes of the files that this rank wrote.
    """
    own_hashes = _on_all_ranks(hashed)
    by_rank: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, own_hashes)
    hashes = {name: value for rank_hashes in by_rank for name, value in rank_hashes.items()}
    _on_rank_0(lambda: _publish(partial, final, manifest, keep, hashes))


def _publish(partial: Path, final: Path, manifest: dict, keep: int, hashes: dict[str, str]) -> None:
    write_manifest(partial, manifest, hashes)
    shutil.rmtree(final, ignore_errors=True)  # the same step was saved before
    os.replace(partial, final)
    for old in whole_checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old)


def load(folder: str | Path, worker) -> None:
    manifest = _on_all_ranks(lambda: _checked_manifest(folder, worker))
    with_random = manifest["layout"] == _parallel_layout(worker)
    state = _state(
        worker, loading=True, with_optimizer=manifest["with_optimizer"], with_random=with_random
    )
    # Some releases of Megatron raise an error only on the rank that reads the damaged part.
    state = _on_all_ranks(lambda: load_state(state, folder))
    for i, chunk in enumerate(_unwrapped(worker)):
        _load_weights(chunk, state[f"model{i}"])
    if manifest["with_optimizer"]:
        _load_optimizer(worker, state)
        worker.scheduler.load_state_dict(state["scheduler"])
    else:
        worker.optimizer.reload_model_params()  # master weights from the loaded ones
    if with_random:
        _set_random_state(state["random"])
    worker.step = manifest.get("optimizer_steps", 0)
    dist.barrier()


def _checked_manifest(folder: str | Path, worker) -> dict:
    """The ranks divide the data files among them for hashing."""
    manifest = read_manifest(folder)
    check_same_model(folder, manifest["model"], worker.arch.hf)
    own_files = data_files(manifest)[dist.get_rank() :: dist.get_world_size()]
    check_intact(folder, manifest, own_files)
    return manifest


def _on_all_ranks(act: Callable[[], Any]) -> Any:
    """The result of `act`. An error of one rank is raised on all, so that none waits for it."""
    result = None
    own_error = None
    try:
        result = act()
    except (CheckpointError, OSError) as error:
        own_error = error
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own_error)
    for found in errors:
        if found is not None:
            raise found
    return result


def _on_rank_0(act: Callable[[], None]) -> None:
    """Run `act` on rank 0; its error is raised on all ranks."""
    _on_all_ranks(lambda: act() if dist.get_rank() == 0 else None)


# ---------------------------------------------------------------- contents


def _unwrapped(worker) -> list:
    chunks = worker.chunks
    while hasattr(chunks[0], "module"):
        chunks = [chunk.module for chunk in chunks]
    return chunks


def model_state(model) -> dict:
    """The sharded state of a GPTModel, without what only Transformer Engine's fp8 would need."""
    state = model.sharded_state_dict(metadata=_metadata())
    return {name: sharded for name, sharded in state.items() if not _is_fp8_state(name)}


def _is_fp8_state(name: str) -> bool:
    """`_extra_state` of a layer; of grouped experts also `_extra_state1` and so on."""
    return re.search(r"_extra_state\d*$", name) is not None


def _metadata() -> dict:
    return {**_FORMAT_OPTIONS, "dp_cp_group": parallel.data_group()}


def _load_weights(model, state: dict) -> None:
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if not _is_fp8_state(name)]
    assert not missing and not unexpected, f"missing {missing}, unexpected {unexpected}"


def _state(worker, loading: bool, with_optimizer: bool = True, with_random: bool = True) -> dict:
    state: dict[str, Any] = {
        f"model{i}": model_state(chunk) for i, chunk in enumerate(_unwrapped(worker))
    }
    if with_optimizer:
        model = dict(state)
        for i, part in enumerate(worker.optimizer.chained_optimizers):
            optimizer = part.sharded_state_dict(model, is_loading=loading, metadata=_metadata())
            state[f"optimizer{i}"] = {"param_state": optimizer["param_state"]}
        state["adam_step"] = _adam_step(worker)
        state["scheduler"] = worker.scheduler.state_dict()
    if with_random:
        place = parallel.place()
        state["random"] = ShardedObject("random", _random_state(), (place.world,), (place.rank,))
    return state


def _load_optimizer(worker, state: dict) -> None:
    """Load Adam's tensors and step; the settings are those of the config.

    Parallel layouts differ in how many optimizers Megatron chains (experts may have their own); the
    keys of the tensors do not depend on it.
    """
    for i, part in enumerate(worker.optimizer.chained_optimizers):
        settings = part.state_dict()
        for group in settings["optimizer"]["param_groups"]:
            group["step"] = state["adam_step"]
        tensors = state[f"optimizer{i}"]["param_state"]
        part.load_state_dict(
            {
                **settings,
                "param_state": tensors,
                "param_state_sharding_type": _FORMAT_OPTIONS["distrib_optim_sharding_type"],
            }
        )
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            _let_fused_adam_count(part.optimizer)


def _let_fused_adam_count(hybrid: HybridDeviceOptimizer) -> None:
    """hybrid_optimizer.py:352 would reset FusedAdam's step to the loaded one before each step."""
    for group in hybrid.param_groups:
        group.pop("step", None)


def _adam_step(worker) -> int:
    """Optimizer steps applied; `worker.step` also counts skipped ones."""
    steps = []
    for part in worker.optimizer.chained_optimizers:
        groups = part.state_dict()["optimizer"]["param_groups"]
        steps += [group.get("step") or 0 for group in groups]
    return int(max(steps))


def _random_state() -> dict:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
        "numpy": _plain_numpy_state(),
        "python": random.getstate(),
    }


def _plain_numpy_state() -> tuple:
    """Without an array: the pickle of one refers to functions, which unpickle.py rejects."""
    name, keys, *rest = cast(tuple, np.random.get_state())
    return name, keys.tolist(), *rest


def _set_random_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)
