"""Shared memory that needs no cleanup.

A segment has a name (a file in /dev/shm) only while processes attach to it. Then the name is
removed, and the kernel frees the memory when the last attached process ends, however it ends.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path("/dev/shm")


@contextmanager
def create(nbytes: int) -> Iterator[str]:
    """The path of a new segment, valid inside the block."""
    path = FOLDER / f"megastep-{os.getpid()}-{secrets.token_hex(4)}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(file, nbytes)
        yield str(path)
    finally:
        os.close(file)
        path.unlink()


def attach(path: str, nbytes: int) -> Tensor:
    """The segment as a tensor of bytes [nbytes], shared by all attached processes."""
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path}: not on this node; sync.backend=shm needs policy and engines on one node"
        )
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
