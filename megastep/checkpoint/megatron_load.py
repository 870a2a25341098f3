"""`dist_checkpointing.load` with the readers of unpickle.py.

Importing this module replaces Megatron's readers and planner.
"""

import io
import pickle
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
)
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from megastep.checkpoint.unpickle import COMMON, CheckedReader, first_line, load_plain
from megastep.distributed.megatron_version import replace_readers
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
    strategy = TorchDistLoadShardedStrategy()
    try:
        return dist_checkpointing.load(state, str(folder), sharded_strategy=strategy)
    except CheckpointError:
        raise
    except CheckpointException as error:  # torch collects the errors of all ranks
        failure, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{folder}: not readable: {first_line(failure)}") from error
    except _BROKEN as error:
        raise CheckpointError(f"{folder}: not readable: {first_line(error)}") from error


def _read_common(folder: Path) -> dict:
    return load_plain(folder / COMMON, folder / COMMON)


class _Planner(MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As the base class, but with weights_only=True."""
        name = read_item.dest_index.fqn
        loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


replace_readers(CheckedReader, _Planner, _read_common)
