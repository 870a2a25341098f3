"""SIGTERM: the machine will soon be taken away, by a time limit, a scheduler or a person.

Until a run has something to keep, `Stopped` is raised wherever it is. After that the loop is asked, and ends at the
next moment at which nothing is lost (train.py). Ray takes the signal for itself when it starts; `kept` gives it back.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODE = 75  # EX_TEMPFAIL: it was stopped and can be run again


class Stopped(Exception):
    """The run was asked to stop; the message says how far it came."""


_ask: Callable[[], None] | None = None


def listen() -> None:
    signal.signal(signal.SIGTERM, _on_signal)


def _on_signal(*_) -> None:
    if _ask is None:
        raise Stopped("stopped")
    _ask()


@contextmanager
def asks(ask: Callable[[], None]) -> Iterator[None]:
    """`ask` is called instead, possibly more than once, between any two operations of the main thread."""
    global _ask
    _ask = ask
    try:
        yield
    finally:
        _ask = None


@contextmanager
def kept() -> Iterator[None]:
    """What the block does to the handler is undone."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is _on_signal:
            listen()
