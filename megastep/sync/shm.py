"""Shared memory that needs no cleaning up.

A segment has a name (a file in /dev/shm) only while processes are invited to map it. Then the name is removed, and
the kernel frees the memory when the last of them has ended, however it ends.
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
def invitation(nbytes: int) -> Iterator[str]:
    """A new segment's name, for as long as the block runs."""
    path = FOLDER / f"megastep-{os.getpid()}-{secrets.token_hex(4)}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(file, nbytes)
        yield str(path)
    finally:
        os.close(file)
        path.unlink()


def join(path: str, nbytes: int) -> Tensor:
    """The segment's bytes [nbytes], shared with everyone who joins."""
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path}: not on this machine; sync.backend=shm needs policy and engines on one node"
        )
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
