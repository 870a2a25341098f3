"""A process that must not outlive the one that started it, however that ends."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Called in the child. Linux only; elsewhere a killed parent leaves its children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
