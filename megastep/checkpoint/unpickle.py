"""Reads the pickles of a checkpoint without running what they name: a foreign checkpoint is data, never code.

    .metadata       a pickle. `pickle.load` of torch.distributed.checkpoint is replaced by `read_metadata`, which knows
                    only that package's own records and refuses every other name
    common.pt       written by torch.save, read with weights_only=True
    __N_M.distcp    one torch.save per tensor and per object (the random state); both read with weights_only=True

megatron_load.py makes Megatron read so. No Megatron here: the driver asks before any rank starts.
"""

import io
import math
import pickle
from pathlib import Path

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

METADATA, BACKEND, COMMON = ".metadata", "metadata.json", "common.pt"
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
)  # of weights and of the optimizer's state
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
                f"names {module}.{name}, which no checkpoint of megastep does"
            )
        return found


def check_no_code(folder: str | Path) -> None:
    """Read what is small and not tensors, before any process starts. Tensors are read by the ranks, equally safe."""
    folder = Path(folder)
    if not (folder / METADATA).is_file():
        return  # the manifest names what must be there; a folder without tensors has nothing to unpickle
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


def _check_types(found: object, folder: Path) -> None:
    """What the libraries rely on. Offsets and names from outside must not lead out of the checkpoint, and what is
    described is stored: a part that is not would be filled with whatever was in memory."""
    path = folder / METADATA
    if (
        type(found) is not Metadata
        or type(found.state_dict_metadata) is not dict
        or type(found.storage_data) is not dict
    ):
        raise CheckpointError(f"{path}: not the metadata of a checkpoint")
    for key, stored in found.state_dict_metadata.items():
        if type(key) is not str or type(stored) not in (
            TensorStorageMetadata,
            BytesStorageMetadata,
        ):
            raise CheckpointError(f"{path}: {key!r:.80} is neither a tensor nor an object")
        offsets = [None]  # an object is stored in one piece
        if type(stored) is TensorStorageMetadata:
            _check_tensor(key, stored, path)
            offsets = [chunk.offsets for chunk in stored.chunks]
        if any(metadata.MetadataIndex(key, offset) not in found.storage_data for offset in offsets):
            raise CheckpointError(
                f"{path}: {key!r:.80} is described and not stored, or not all of it"
            )
    sizes: dict[str, int] = {}
    for index, place in found.storage_data.items():
        name, begin, length = place.relative_path, place.offset, place.length
        if type(index) is not metadata.MetadataIndex or index.fqn not in found.state_dict_metadata:
            raise CheckpointError(f"{path}: {index!r:.80} is stored and not described")
        if type(name) is not str or Path(name).name != name or not name.endswith(DATA):
            raise CheckpointError(f"{path}: {name!r:.80} is no data file of this checkpoint")
        if name not in sizes:
            sizes[name] = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if (
            type(begin) is not int
            or type(length) is not int
            or not 0 <= begin <= begin + length <= sizes[name]
        ):
            raise CheckpointError(f"{path}: {index.fqn:.80} lies outside of {name}")
        if place.transform_descriptors:
            raise CheckpointError(
                f"{path}: {index.fqn:.80} is stored by an extension, which megastep never uses"
            )


def _check_tensor(key: str, stored: TensorStorageMetadata, path: Path) -> None:
    shapes = [stored.size] + [
        size for chunk in stored.chunks for size in (chunk.offsets, chunk.sizes)
    ]
    if (
        any(type(shape) is not torch.Size for shape in shapes)
        or type(stored.properties.dtype) is not torch.dtype
    ):
        raise CheckpointError(f"{path}: {key!r:.80} has no shape or no dtype")
    if stored.properties.dtype not in _DTYPES:
        raise CheckpointError(
            f"{path}: {key!r:.80} is of {stored.properties.dtype}, must be of a floating-point dtype"
        )
    if not _covers(stored.size, stored.chunks):
        raise CheckpointError(
            f"{path}: the chunks of {key!r:.80} do not cover its shape {list(stored.size)!s:.80} "
            "exactly once"
        )


def _covers(size: torch.Size, chunks: list[metadata.ChunkStorageMetadata]) -> bool:
    """Whether the chunks are the cells of a grid over the tensor, each cell once. Ranks cut tensors in no other way.

    The grid's lines are the offsets of the chunks: a chunk that ends at the next line of every dimension overlaps no
    chunk of another offset, and then as many chunks as the grid has cells leave no hole. Linear in the chunks.
    """
    if any(len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size) for chunk in chunks):
        return False
    ends = []  # of each dimension: where a cell that begins at an offset ends
    for dimension, length in enumerate(size):
        lines = sorted({chunk.offsets[dimension] for chunk in chunks})
        if not lines or lines[0] != 0 or lines[-1] > length:
            return False
        ends.append(dict(zip(lines, [*lines[1:], length], strict=True)))
    for chunk in chunks:
        reached = [
            offset + extent for offset, extent in zip(chunk.offsets, chunk.sizes, strict=True)
        ]
        if reached != [ends[dimension][offset] for dimension, offset in enumerate(chunk.offsets)]:
            return False
    return len({chunk.offsets for chunk in chunks}) == len(chunks) == math.prod(map(len, ends))


def load_plain(source: Path | io.BytesIO, path: Path):
    """What torch.save wrote, of tensors and plain types; `path` is named where it cannot be read."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing from the checkpoint") from None
    except Exception as error:
        raise CheckpointError(f"{path}: not readable: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """Torch's own words about a refused pickle are a page of advice on how to read it all the same."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next(
        (line for line in lines if "GLOBAL" in line), lines[0] if lines else type(error).__name__
    )
    return named[:200]


class CheckedReader(filesystem.FileSystemReader):
    """torch.distributed.checkpoint's reader; tensors it reads with weights_only=True itself."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = read_metadata(self.path)
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata
