"""Child processes: they exit with their parent and write their output to a log file."""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Called in the child. Linux only; elsewhere children survive a killed parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forks_end_with_us() -> None:
    """Kill this process's forks when it dies.

    Megatron's saves fork writers. A writer that survives a killed rank keeps its connections open,
    so Ray would consider the rank alive, and the others would wait for it.
    """
    os.register_at_fork(after_in_child=end_with_parent)


def send_output_to(path: Path) -> None:
    """Redirect stdout and stderr, file descriptors included, to a log file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
