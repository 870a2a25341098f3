"""How a process that another one started behaves: it ends with its parent, and its chatter goes to a file."""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Called in the child. Linux only; elsewhere a killed parent leaves its children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forks_end_with_us() -> None:
    """Megatron's saves fork writers. One that outlives a killed rank also keeps its connections open, and Ray, which
    watches those, would take the rank for alive and let everybody wait for it."""
    os.register_at_fork(after_in_child=end_with_parent)


def send_output_to(path: Path) -> None:
    """Megatron's, torch's and vLLM's chatter goes to a log, file descriptors included."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
