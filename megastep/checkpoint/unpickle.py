"""Reads the pickles of a checkpoint without executing them: a foreign checkpoint is data, not code.

    .metadata       a pickle; `read_metadata`, which allows only the records of
                    torch.distributed.checkpoint, replaces that package's `pickle.load`
    common.pt       written by torch.save, read with weights_only=True
    __N_M.distcp    one torch.save per tensor and per object (the random state), read with
                    weights_only=True

megatron_load.py makes Megatron use these readers. No Megatron here: the driver checks a checkpoint
before any rank starts.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)

from megastep.checkpoint.manifest import DATA, read_object
from megastep.errors import CheckpointError

METADATA = ".metadata"
BACKEND = "metadata.json"
COMMON = "common.pt"
# Of weights and of the optimizer's state.
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_RECORDS = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    planner.BytesIOWriteData,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
)
_ALLOWED = {(record.__module__, record.__qualname__): record for record in _RECORDS}
_ALLOWED |= {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
_ALLOWED |= {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        found = _ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(
                f"refers to {module}.{name}, which is not allowed in a checkpoint"
            )
        return found


def check_no_code(folder: str | Path) -> None:
    """Read everything but the tensors, before any process starts.

    The ranks read the tensors, with weights_only=True.
    """
    folder = Path(folder)
    if not (folder / METADATA).is_file():
        return  # no tensors: nothing to unpickle. The manifest lists the required files.
    backend = read_object(folder / BACKEND).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder / BACKEND}: sharded_backend is {backend!r:.80}, must be torch_dist"
        )
    found = read_metadata(folder)
    load_plain(folder / COMMON, folder / COMMON)
    for index, place in found.storage_data.items():
        if isinstance(found.state_dict_metadata[index.fqn], BytesStorageMetadata):
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                load_plain(io.BytesIO(file.read(place.length)), folder / place.relative_path)


def read_metadata(folder: str | Path) -> Metadata:
    path = Path(folder) / METADATA
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        _check_types(found, path.parent)
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle raises almost anything
        raise CheckpointError(f"{path}: not readable: {first_line(error)}") from None
    found.storage_meta = found.storage_meta or StorageMeta()
    return found


def _check_types(found: Any, folder: Path) -> None:
    """Check the metadata that the libraries rely on.

    File names and offsets must stay inside the checkpoint. Everything described must be stored:
    a missing part would be filled with uninitialized memory.
    """
    path = folder / METADATA
    if (
        type(found) is not Metadata
        or type(found.state_dict_metadata) is not dict
        or type(found.storage_data) is not dict
    ):
        raise CheckpointError(f"{path}: not the metadata of a checkpoint")
    for key, stored in found.state_dict_metadata.items():
        _check_described(key, stored, found.storage_data, path)
    sizes: dict[str, int] = {}  # of the data files; -1: missing
    for index, place in found.storage_data.items():
        if type(index) is not metadata.MetadataIndex or index.fqn not in found.state_dict_metadata:
            raise CheckpointError(f"{path}: {index!r:.80} is stored but not described")
        _check_stored(index.fqn, place, folder, sizes)


def _check_described(key: object, stored: Any, storage_data: dict, path: Path) -> None:
    """A tensor or an object, all parts of which are stored."""
    kinds = (TensorStorageMetadata, BytesStorageMetadata)
    if type(key) is not str or type(stored) not in kinds:
        raise CheckpointError(f"{path}: {key!r:.80} is neither a tensor nor an object")
    offsets = [None]  # an object is stored in one part
    if type(stored) is TensorStorageMetadata:
        _check_tensor(key, stored, path)
        offsets = [chunk.offsets for chunk in stored.chunks]
    if any(metadata.MetadataIndex(key, offset) not in storage_data for offset in offsets):
        raise CheckpointError(f"{path}: {key!r:.80} is described but not completely stored")


def _check_stored(
    key: str, place: filesystem._StorageInfo, folder: Path, sizes: dict[str, int]
) -> None:
    """A range of bytes inside a data file. `sizes` caches the sizes of the files."""
    path = folder / METADATA
    name = place.relative_path
    if type(name) is not str or Path(name).name != name or not name.endswith(DATA):
        raise CheckpointError(f"{path}: {name!r:.80} is not a data file of this checkpoint")
    if name not in sizes:
        sizes[name] = (folder / name).stat().st_size if (folder / name).is_file() else -1
    begin = place.offset
    length = place.length
    are_ints = type(begin) is int and type(length) is int
    if not are_ints or not 0 <= begin <= begin + length <= sizes[name]:
        raise CheckpointError(f"{path}: {key:.80} lies outside of {name}")
    if place.transform_descriptors:
        raise CheckpointError(
            f"{path}: {key:.80} is stored by an extension, which megastep does not use"
        )


def _check_tensor(key: str, stored: TensorStorageMetadata, path: Path) -> None:
    shapes = [stored.size]
    for chunk in stored.chunks:
        shapes += [chunk.offsets, chunk.sizes]
    dtype = stored.properties.dtype
    if any(type(shape) is not torch.Size for shape in shapes) or type(dtype) is not torch.dtype:
        raise CheckpointError(f"{path}: {key!r:.80} has no shape or no dtype")
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path}: {key!r:.80} is {dtype}, must be a floating-point dtype")
    if not _covers(stored.size, stored.chunks):
        raise CheckpointError(
            f"{path}: the chunks of {key!r:.80} do not cover its shape {list(stored.size)!s:.80} "
            "exactly once"
        )


def _covers(size: torch.Size, chunks: list[metadata.ChunkStorageMetadata]) -> bool:
    """Whether the chunks are the cells of a grid over the tensor, each once, as ranks shard it.

    The grid's lines are the offsets of the chunks. A chunk that ends at the next line of every
    dimension overlaps no chunk of another offset; as many distinct chunks as the grid has cells
    then leave no hole. Linear in the chunks.
    """
    if any(len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size) for chunk in chunks):
        return False
    ends = []  # of each dimension: the end of the cell that begins at an offset
    for dimension, length in enumerate(size):
        lines = sorted({chunk.offsets[dimension] for chunk in chunks})
        if not lines or lines[0] != 0 or lines[-1] > length:
            return False
        ends.append(dict(zip(lines, [*lines[1:], length], strict=True)))
    for chunk in chunks:
        for offset, extent, end_of in zip(chunk.offsets, chunk.sizes, ends, strict=True):
            if offset + extent != end_of[offset]:
                return False
    cells = math.prod(map(len, ends))
    return len({chunk.offsets for chunk in chunks}) == len(chunks) == cells


def load_plain(source: Path | io.BytesIO, path: Path):
    """A torch.save of tensors and plain types; errors name `path`."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing from the checkpoint") from None
    except Exception as error:
        raise CheckpointError(f"{path}: not readable: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The line of a torch error that names the problem; the rest is advice on unsafe loading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__[:200]
    named = next((line for line in lines if "GLOBAL" in line), lines[0])
    return named[:200]


class CheckedReader(filesystem.FileSystemReader):
    """torch.distributed.checkpoint's reader, which reads tensors with weights_only=True."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = read_metadata(self.path)
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata
