"""What differs between the releases 0.16.1 to 0.19.2 of Megatron-Core, detected by feature.

The callers do not depend on the release:

    MLP of a layer spec    a ModuleSpec; since 0.18 a functools.partial
    background save        by Megatron's own writer; since 0.17 only on request
    common state           all that a checkpoint holds besides shards: in common.pt; since 0.19 in
                           an object among the shards, where 0.16 to 0.18 do not look for it
    reader of common.pt    a strategy; since 0.17 a function
    reader of the shards   since 0.17 called with `async_strategy` too
    errors of a load       raised on all ranks; since 0.18 on the rank that has it, so that the
                           caller must exchange them

A checkpoint has a common.pt under every release, so that each reads those of the others.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import common as common_strategies
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.transformer.spec_utils import ModuleSpec


def mlp_submodules(layer: ModuleSpec) -> Any:
    """The submodules of a layer's MLP or mixture of experts."""
    mlp = layer.submodules.mlp
    if isinstance(mlp, functools.partial):
        return mlp.keywords["submodules"]
    return mlp.submodules


def save_checkpoint(state: dict, folder: Path, in_background: bool) -> AsyncRequest | None:
    """`dist_checkpointing.save`: a request to schedule if in the background, else None."""
    options: dict[str, Any] = {"async_sharded_save": in_background}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"
    request = dist_checkpointing.save(state, str(folder), **options)
    common_file = folder / common_strategies.COMMON_STATE_FNAME
    if dist.get_rank() == 0 and not common_file.exists():
        _, common = save_preprocess(state, validate_access_integrity=False)
        torch.save(common, common_file)
    return request


def replace_readers(
    open_shards: Callable[[str | Path], Any], planner: type, read_common: Callable[[Path], dict]
) -> None:
    """Replace Megatron's readers: most releases accept none from their callers.

    open_shards: a torch.distributed.checkpoint reader of a folder. read_common: a folder's
    common.pt.
    """

    def shard_reader(folder: str | Path, cache_metadata: bool = False, async_strategy: str = ""):
        return open_shards(folder)

    def common_reader(folder: str | Path) -> dict:
        return read_common(Path(folder))

    torch_strategies._get_filesystem_reader = shard_reader
    torch_strategies.MCoreLoadPlanner = planner
    if hasattr(common_strategies, "TorchCommonLoadStrategy"):
        strategy = common_strategies.TorchCommonLoadStrategy
        strategy.load_common = lambda self, folder: common_reader(folder)
    else:
        serialization.load_common = common_reader
        # 0.19 would read the object among the shards, with pickle, where common.pt is missing.
        serialization.load_common_state_dict = common_reader
