"""`dist_checkpointing.load` with the readers of unpickle.py.

Megatron accepts neither a reader nor a planner from its callers: importing this module replaces
both in Megatron.
"""

import io
import pickle
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from megastep.checkpoint.unpickle import COMMON, CheckedReader, first_line, load_plain
from megastep.errors import CheckpointError

_BROKEN = (
    CheckpointingException,
    pickle.UnpicklingError,
    EOFError,
    KeyError,
    RuntimeError,
    ValueError,
)


def load_state(state: dict, folder: str | Path) -> dict:
    """Fill `state` from the files; errors of the libraries become a one-line CheckpointError."""
    strategy = megatron_torch.TorchDistLoadShardedStrategy()
    try:
        return dist_checkpointing.load(
            state, str(folder), sharded_strategy=strategy, common_strategy=_CommonReader()
        )
    except CheckpointError:
        raise
    except CheckpointException as error:  # torch collects the errors of all ranks
        failure, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{folder}: not readable: {first_line(failure)}") from error
    except _BROKEN as error:
        raise CheckpointError(f"{folder}: not readable: {first_line(error)}") from error


class _CommonReader(TorchCommonLoadStrategy):
    def load_common(self, checkpoint_dir: str | Path) -> dict:
        path = Path(checkpoint_dir) / COMMON
        return load_plain(path, path)


class _Planner(megatron_torch.MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As the base class, but with weights_only=True."""
        name = read_item.dest_index.fqn
        set_element(
            self.original_state_dict, self.mappings[name], torch.load(value, weights_only=True)
        )


megatron_torch._get_filesystem_reader = lambda folder, cache_metadata=False: CheckedReader(folder)
megatron_torch.MCoreLoadPlanner = _Planner
