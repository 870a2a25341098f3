"""Plants code in the files of a checkpoint, as an attacker would, and updates the manifest."""

import io
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megastep.checkpoint.manifest import MANIFEST, write_manifest


class Payload:
    """Unpickling it creates the folder `marker`."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def plant(folder: Path, where: str, marker: Path) -> None:
    """`where`: the name of a file, or `tensor` or `object` for an entry of the data files."""
    if where in ("tensor", "object"):
        _plant_entry(folder, where == "object", marker)
    elif where.endswith(".pt"):
        torch.save({"state": Payload(marker)}, folder / where)
    else:
        (folder / where).write_bytes(pickle.dumps(Payload(marker)))
    if where != MANIFEST:
        seal_again(folder)


def _plant_entry(folder: Path, is_object: bool, marker: Path) -> None:
    """After the last entry of a data file; the metadata points to it."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    kinds = metadata.state_dict_metadata
    # Of the objects only the random state is read by the ranks; some releases of Megatron write
    # others.
    index = next(
        i
        for i in metadata.storage_data
        if isinstance(kinds[i.fqn], BytesStorageMetadata) == is_object
        and i.fqn.startswith("random/") == is_object
    )
    place = metadata.storage_data[index]
    blob = io.BytesIO()
    torch.save([Payload(marker)], blob)
    file = folder / place.relative_path
    offset = file.stat().st_size
    file.write_bytes(file.read_bytes() + blob.getvalue())
    metadata.storage_data[index] = replace(place, offset=offset, length=len(blob.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def seal_again(folder: Path) -> None:
    """Rewrite the manifest with the current sizes and hashes."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    write_manifest(folder, {key: value for key, value in manifest.items() if key != "files"})
