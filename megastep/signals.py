"""SIGTERM and SIGINT during a command.

before the start   the process exits at once with a line; an exception in the middle of an import
                   would end in a library's traceback or crash
Ray is starting    the signal is postponed: an exception would leave Ray's processes behind
running            SIGTERM raises `Stopped`; once training has state to save, it calls the loop,
                   which stops where no work is lost (trainer/loop.py). SIGINT raises
                   KeyboardInterrupt
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

EXIT_CODE = 75  # EX_TEMPFAIL: stopped, can be resumed
INTERRUPTED = 130
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BEFORE_START: dict[int, tuple[bytes, int]] = {
    signal.SIGTERM: (b"stopped", EXIT_CODE),
    signal.SIGINT: (b"interrupted", INTERRUPTED),
}


class Stopped(BaseException):
    """The run was asked to stop. A BaseException, like KeyboardInterrupt: no `except Exception` of
    a library or an environment may catch it.
    """


_ask: Callable[[], None] | None = None
_has_started = False
_postponed: list[int] | None = None  # signals received while postponed
_resume_hint: Callable[[], str] | None = None


def listen() -> None:
    for number in _SIGNALS:
        signal.signal(number, _on_signal)


@contextmanager
def listening() -> Iterator[None]:
    """Install the handlers for one command; restores the previous ones."""
    global _has_started, _resume_hint
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _has_started, _resume_hint = False, None
    listen()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_signal(number: int, *_) -> None:
    if _postponed is not None:
        _postponed.append(number)
    elif not _has_started:
        _exit_now(number)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    elif _ask is None:
        raise Stopped("stopped")
    else:
        _ask()


def _exit_now(number: int) -> None:
    word, code = _BEFORE_START[number]
    with suppress(Exception):  # the signal may have interrupted a flush
        sys.stdout.flush()
    os.write(2, b"\n" + word + b" before anything was started\n")
    os._exit(code)


def has_started() -> None:
    """Call before the first child process starts."""
    global _has_started
    _has_started = True


@contextmanager
def postponed() -> Iterator[None]:
    """Handle signals at the end of the block; no effect if no command listens."""
    global _postponed
    if not is_listening():
        yield
        return
    _postponed = []
    try:
        yield
    finally:
        came, _postponed = _postponed, None
        for number in came[:1]:
            _on_signal(number)


def is_listening() -> bool:
    return signal.getsignal(signal.SIGTERM) is _on_signal


@contextmanager
def asks(ask: Callable[[], None]) -> Iterator[None]:
    """SIGTERM calls `ask`, possibly repeatedly, between any two operations of the main thread."""
    global _ask
    _ask = ask
    try:
        yield
    finally:
        _ask = None


def advise(resume_hint: Callable[[], str]) -> None:
    """Set the hint that `advice` returns; called at the end, when the last checkpoint is known."""
    global _resume_hint
    _resume_hint = resume_hint


def advice() -> str:
    return "" if _resume_hint is None else f"; {_resume_hint()}"
