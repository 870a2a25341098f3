"""megastep.json: the contents of a checkpoint and their integrity. Needs no torch: cheap to import.

Written last, it lists every file with its size and SHA-256. Loading checks it first, so that a
truncated, damaged or foreign folder is rejected before any tensor is read. `read_manifest` compares
all sizes and the hashes of everything but the tensors; `check_intact` hashes those, divided among
the ranks.

The hashes find damage, not an attacker, who can write a manifest too: see unpickle.py.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from megastep.errors import CheckpointError
from megastep.models.architecture import Architecture

MANIFEST = "megastep.json"
HF = "hf"  # folder of config.json and tokenizer
DATA = ".distcp"  # files of tensors: most of the bytes
FORMAT = 2  # 1 had no hashes
# Keys of config.json that may differ between the run that saved and the run that loads.
_IRRELEVANT = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures")


def latest(root: str | Path) -> Path | None:
    """The newest complete checkpoint."""
    found = whole_checkpoints(root)
    return found[-1] if found else None


def whole_checkpoints(root: str | Path) -> list[Path]:
    """Oldest first. Partial folders do not match."""
    if Path(root).is_file():
        raise CheckpointError(f"{root}: a folder of checkpoints is needed, this is a file; move it")
    folders = [p for p in Path(root).glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(folders, key=lambda p: int(p.name.removeprefix("step_")))


def describe(arch: Architecture, step: int, layout: dict | None, with_optimizer: bool) -> dict:
    return {
        "format": FORMAT,
        "step": step,
        "layout": layout,
        "with_optimizer": with_optimizer,
        "model": arch.hf,
    }


def write_manifest(folder: Path, manifest: dict, hashed: dict[str, str] | None = None) -> None:
    """`hashed`: known hashes, by file name."""
    names = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]
    known = hashed or {}
    hashes = {**hash_files(folder, set(names) - set(known)), **known}
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": hashes[name]} for name in names
    }
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": files}, indent=1))


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:  # an error of a read does not name the file
            raise OSError(error.errno, error.strerror, str(folder / name)) from error
    return found


def read_manifest(folder: str | Path) -> dict:
    """The manifest of a complete checkpoint, checked."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint")
    _check_no_links(folder)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder}: no {MANIFEST}: not a megastep checkpoint, or an incomplete one"
        )
    manifest = read_object(folder / MANIFEST)
    _check_types(folder, manifest)
    for name, file in manifest["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            raise CheckpointError(f"{folder / name}: missing from the checkpoint")
        if found != file["bytes"]:
            raise CheckpointError(f"{folder / name}: truncated, {found} bytes of {file['bytes']}")
    check_intact(folder, manifest, [name for name in manifest["files"] if not name.endswith(DATA)])
    return manifest


def _check_no_links(folder: Path) -> None:
    """Through a link an export could copy any file of this machine. `folder` may be one itself."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent) / name
            if path.is_symlink():
                raise CheckpointError(
                    f"{path}: is a symbolic link, which a checkpoint may not contain; copy the "
                    "file here"
                )


def check_intact(folder: str | Path, manifest: dict, names: Iterable[str]) -> None:
    try:
        hashed = hash_files(Path(folder), names)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: not readable ({error.strerror})") from None
    for name, found in hashed.items():
        if found != manifest["files"][name]["sha256"]:
            raise CheckpointError(
                f"{Path(folder) / name}: damaged, its SHA-256 differs from {MANIFEST}"
            )


def data_files(manifest: dict) -> list[str]:
    return sorted(name for name in manifest["files"] if name.endswith(DATA))


def _check_types(folder: Path, manifest: dict) -> None:
    path = folder / MANIFEST
    version = manifest.get("format")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{path}: format is {version!r:.80}, must be a positive integer")
    if version > FORMAT:
        raise CheckpointError(
            f"{folder}: format {version} is newer than this megastep, which reads up to {FORMAT}"
        )
    if version < FORMAT:
        raise CheckpointError(
            f"{folder}: format {version} is older than this megastep, which reads {FORMAT}; export "
            "it to a Hugging Face folder with the version of megastep that wrote it"
        )
    wanted: dict[str, type | tuple[type, ...]] = {
        "step": int,
        "with_optimizer": bool,
        "model": dict,
        "files": dict,
        "layout": (dict, type(None)),
    }
    check_types(path, manifest, wanted)
    check_types(path, {"optimizer_steps": 0, **manifest}, {"optimizer_steps": int})
    for name, file in manifest["files"].items():
        inside = (
            name
            and not Path(name).is_absolute()
            and ".." not in Path(name).parts
            and "\0" not in name
        )
        if not inside:
            raise CheckpointError(f"{path}: files: {name!r:.80} is not a path in a checkpoint")
        if (
            type(file) is not dict
            or type(file.get("bytes")) is not int
            or type(file.get("sha256")) is not str
        ):
            raise CheckpointError(f"{path}: files: {name!r:.80} needs `bytes` and `sha256`")


def check_types(path: Path, found: dict, wanted: dict[str, type | tuple[type, ...]]) -> None:
    """Check the entries of a JSON object; a bool is not an int."""
    for key, expected in wanted.items():
        allowed = expected if isinstance(expected, tuple) else (expected,)
        if key not in found:
            raise CheckpointError(f"{path}: {key} is missing")
        if type(found[key]) not in allowed:
            names = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
            raise CheckpointError(f"{path}: {key} is {found[key]!r:.80}, must be of type {names}")


def read_object(path: Path) -> dict:
    """The JSON object in a file; any other content raises CheckpointError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: not readable ({error.strerror})") from None
    except RecursionError:
        raise CheckpointError(f"{path}: not readable: JSON nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, a number of thousands of digits
        raise CheckpointError(f"{path}: not readable as JSON: {str(error)[:120]}") from None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path}: not readable: a JSON object is needed, this is a {type(found).__name__}"
        )
    return found


def check_same_model(folder, saved: dict, ours: dict) -> None:
    for key in sorted(set(saved) | set(ours)):
        there, here = saved.get(key), ours.get(key)
        if key not in _IRRELEVANT and there != here:
            raise CheckpointError(
                f"{folder}: is a checkpoint of another model: {key} is {there!s:.200} there, "
                f"{here!s:.200} here"
            )
