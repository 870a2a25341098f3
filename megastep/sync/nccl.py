"""Abort of a weight sync's nccl group: NCCL itself waits forever for a member that died.

    rank 0      learns of the death from Ray, or of a hung engine by the deadline: sets a key in the
                group's store and aborts its own communicator
    workers     poll the key while they receive, and abort theirs

An aborted communicator completes what its streams wait for, and ignores later calls. Written
against vLLM 0.30: PyNcclCommunicator with the store of its StatelessProcessGroup. Tested with a
fake communicator, not run on a GPU yet.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_KEY = "megastep/aborted"
_POLL_S = 0.5


class Group:
    """The group on rank 0; without a communicator while it forms."""

    def __init__(self) -> None:
        self.communicator: Any = None  # vLLM's PyNcclCommunicator
        self.is_aborted = False
        self.error: Exception | None = None  # that an engine raised

    def abort(self) -> None:
        self.is_aborted = True
        if self.communicator is not None:
            self.communicator.group.store.set(_KEY, b"1")
            self.communicator.destroy()

    def close(self) -> None:
        """Workers close their side when they join the next group."""
        if self.communicator is not None:
            self.communicator.destroy()  # vLLM would keep its GPU memory


class Watch:
    """A worker's view of the group while it receives."""

    def __init__(self, communicator: Any):
        self._communicator = communicator
        self._ended = threading.Event()
        self.is_aborted = False

    def _run(self) -> None:
        store = self._communicator.group.store
        while not self._ended.is_set():
            try:
                self.is_aborted = store.check([_KEY])
            except RuntimeError:  # rank 0, which holds the store, is gone
                self.is_aborted = True
            if self.is_aborted:
                self._communicator.destroy()
                return
            self._ended.wait(_POLL_S)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="nccl-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
