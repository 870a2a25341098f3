"""megastep.json: what a checkpoint folder is and whether it is whole. No torch, so that it can be asked early.

Written last, it names every file and its size. Loading starts by checking it, so that a truncated or foreign
folder is refused by name before any tensor is touched.
"""

import json
import re
from pathlib import Path

from megastep.architecture import Architecture

MANIFEST = "megastep.json"
HF = "hf"  # folder of config.json and tokenizer
FORMAT = 1
# What may differ between the run that saved and the run that loads: names of files and versions.
_IRRELEVANT = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures")


class CheckpointError(ValueError):
    """A folder that cannot be loaded; the message names it and the reason, in one line."""


def latest(root: str | Path) -> Path | None:
    """The newest whole checkpoint."""
    found = whole_checkpoints(root)
    return found[-1] if found else None


def whole_checkpoints(root: str | Path) -> list[Path]:
    """Oldest first. Partial folders do not match."""
    folders = [p for p in Path(root).glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(folders, key=lambda p: int(p.name.removeprefix("step_")))


def describe(arch: Architecture, step: int, layout: dict | None, with_optimizer: bool) -> dict:
    return {"format": FORMAT, "step": step, "layout": layout, "with_optimizer": with_optimizer, "model": arch.hf}


def write_manifest(folder: Path, manifest: dict) -> None:
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": files}, indent=1))


def read_manifest(folder: str | Path) -> dict:
    """The checked description of a whole checkpoint."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint")
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder}: no {MANIFEST}: not a checkpoint of megastep, or one that was never finished")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files = manifest["format"], manifest["files"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        raise CheckpointError(f"{folder / MANIFEST}: not readable") from None
    if version > FORMAT:
        raise CheckpointError(f"{folder}: format {version} is newer than this megastep, which reads up to {FORMAT}")
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            raise CheckpointError(f"{folder / name}: missing from the checkpoint")
        if found != size:
            raise CheckpointError(f"{folder / name}: truncated, {found} bytes of {size}")
    return manifest


def refuse_other_model(folder, saved: dict, ours: dict) -> None:
    for key in sorted(set(saved) | set(ours)):
        there, here = saved.get(key), ours.get(key)
        if key not in _IRRELEVANT and there != here:
            raise CheckpointError(f"{folder}: is of another model: {key} is {there} there, {here} here")
