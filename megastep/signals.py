"""SIGTERM and SIGINT, from the first moment to the last.

at first        nothing has started: the process ends at once with a line. No exception is raised: in the middle of
                an import it would end in a traceback of a library, or in a crash of one.
postponed       Ray starts: what is raised would leave its processes behind. The signal counts when it has started.
afterwards      SIGTERM: the machine will soon be taken away, by a time limit, a scheduler or a person. `Stopped` is
                raised wherever the run is; once it has something to keep, the loop is asked instead and ends at
                the next moment at which nothing is lost (trainer/loop.py). SIGINT raises KeyboardInterrupt.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

EXIT_CODE = 75  # EX_TEMPFAIL: it was stopped and can be run again
INTERRUPTED = 130
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NOTHING_YET = {
    signal.SIGTERM: (b"stopped", EXIT_CODE),
    signal.SIGINT: (b"interrupted", INTERRUPTED),
}


class Stopped(BaseException):
    """The run was asked to stop; the message says how far it came. Like KeyboardInterrupt, no `except Exception` of a
    library or an environment may take it for a failure of its own."""


_ask: Callable[[], None] | None = None
_has_started = False
_postponed: list[int] | None = None  # signals that came meanwhile
_resume_hint: Callable[[], str] | None = None


def listen() -> None:
    for number in _SIGNALS:
        signal.signal(number, _on_signal)


@contextmanager
def listening() -> Iterator[None]:
    """For the length of a command; what was there before comes back."""
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
        _end_now(number)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    elif _ask is None:
        raise Stopped("stopped")
    else:
        _ask()


def _end_now(number: int) -> None:
    word, code = _NOTHING_YET[number]
    with suppress(Exception):  # the signal may have come in the middle of a flush
        sys.stdout.flush()
    os.write(2, b"\n" + word + b" before anything was started\n")
    os._exit(code)


def has_started() -> None:
    """From now on there are processes to end."""
    global _has_started
    _has_started = True


@contextmanager
def postponed() -> Iterator[None]:
    """A signal inside the block counts at its end. Nothing changes where no command listens."""
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
    """`ask` is called instead, possibly more than once, between any two operations of the main thread."""
    global _ask
    _ask = ask
    try:
        yield
    finally:
        _ask = None


def advise(resume_hint: Callable[[], str]) -> None:
    """What `advice` returns from now on; asked at the end, when it is known what was kept."""
    global _resume_hint
    _resume_hint = resume_hint


def advice() -> str:
    return "" if _resume_hint is None else f"; {_resume_hint()}"
