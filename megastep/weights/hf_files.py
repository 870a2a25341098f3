"""A Hugging Face model folder: read tensor by tensor, written shard by shard.

A shard is one safetensors file. Reading maps one shard at a time; writing holds the tensors of one
shard. A folder is written next to its destination and renamed: a killed run leaves no half model.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megastep.errors import WeightsError
from megastep.models.architecture import read_architecture
from megastep.weights.mapping import check_shape, param_mappings

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9


class HFReader:
    """`reader(name)` returns one tensor, or raises a WeightsError that names it."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.file_of = self._index()
        self._open_name: str | None = None
        self._open: Any = None  # the shard `_open_name`, mapped
        self._names: set[str] = set()  # of its tensors

    def _index(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                return json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError):
                raise WeightsError(f"{index}: not an index of safetensors files") from None
        if (self.folder / SINGLE).is_file():
            with self._opened(SINGLE) as file:
                return dict.fromkeys(file.keys(), SINGLE)
        raise WeightsError(f"{self.folder}: no weights; {SINGLE} or {INDEX} is needed")

    def _opened(self, name: str):
        try:
            return safe_open(self.folder / name, framework="pt")
        except FileNotFoundError:
            raise WeightsError(
                f"{self.folder / name}: missing, though the index names it"
            ) from None
        except SafetensorError as error:
            raise WeightsError(
                f"{self.folder / name}: not a whole safetensors file ({error})"
            ) from None

    def __call__(self, name: str) -> Tensor:
        return self._shard_of(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shard_of(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._shard_of(name).get_slice(name).get_dtype()]

    def _shard_of(self, name: str):
        if name not in self.file_of:
            raise WeightsError(f"{self.folder}: tensor {name} is missing")
        file = self.file_of[name]
        if file != self._open_name:
            self._open_name = file
            self._open = self._opened(file)
            self._names = set(self._open.keys())
        if name not in self._names:
            raise WeightsError(
                f"{self.folder / file}: tensor {name} is missing, though the index names it"
            )
        return self._open


def check_complete(folder: str | Path) -> None:
    """Every tensor exists with the shape that config.json implies; reads headers only."""
    reader = HFReader(folder)
    for mapping in param_mappings(read_architecture(folder)).values():
        for name, shape in mapping.hf:
            check_shape(name, reader.shape(name), shape)


@contextmanager
def written_atomically(destination: str | Path) -> Iterator[Path]:
    """A temporary folder to write into, renamed to `destination` unless the block raises."""
    destination = Path(destination)
    check_empty(destination)
    partial = destination.with_name(f"{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if destination.exists():
        destination.rmdir()  # empty: check_empty
    os.replace(partial, destination)


def check_empty(folder: str | Path) -> None:
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise WeightsError(f"{folder}: is not empty; give a new folder, nothing is overwritten")


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> int:
    """Write tensors as `model-00001-of-0000N.safetensors` with an index; returns their bytes."""
    shards: list[list[str]] = []  # names of the tensors in each
    pending: dict[str, Tensor] = {}
    pending_bytes = 0
    total_bytes = 0
    mode = _mode_of_new_files(folder)

    def flush() -> None:
        nonlocal pending_bytes
        file = folder / f"shard-{len(shards)}"
        save_file(pending, file, metadata={"format": "pt"})
        file.chmod(mode)  # safetensors makes files readable by their owner only
        shards.append(list(pending))
        pending.clear()
        pending_bytes = 0

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    _name_shards(folder, shards, total_bytes)
    return total_bytes


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Rename the shards last: their names contain their number."""
    if len(shards) == 1:
        os.replace(folder / "shard-0", folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        os.replace(folder / f"shard-{i}", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
    )


def copy_companions(source: str | Path, destination: Path) -> None:
    """Copy config, tokenizer and templates: every file without weights."""
    destination.mkdir(exist_ok=True)
    for file in sorted(Path(source).iterdir()):
        is_weight = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weight:
            shutil.copy2(file, destination / file.name)


def _mode_of_new_files(folder: Path) -> int:
    """Of a probe file: reading the umask would set it, for all threads."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    return mode
