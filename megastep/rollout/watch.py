"""Detect environments that block the event loop, which all episodes share.

A coroutine holds the event loop from one await to the next: one blocked interval. `timed` drives a
coroutine as `await` does and measures each interval. A daemon thread checks the current interval
every CHECK_EVERY_S and warns while it lasts, since one that never ends is never measured.
"""

import contextlib
import functools
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

BLOCKED_S = 0.5  # an interval of this length is reported; a shorter one may be the machine's
WINDOW_S = 10.0
MAX_BLOCKED_FRACTION = 0.5  # of WINDOW_S, over intervals of any length
WARN_AFTER_S = (5.0, 60.0)  # warn when the current interval reaches these lengths
CHECK_EVERY_S = 1.0


class Interval(NamedTuple):
    who: Callable[[], str]  # called only for a warning
    start_s: float


_current: dict[int, Interval] = {}  # by thread: the interval its event loop is in


@types.coroutine
def timed(call: Coroutine, who: Callable[[], str], on_interval: Callable[[float], None]):
    """Await `call` and pass the seconds of each blocked interval to `on_interval`."""
    _start_watching()
    thread = threading.get_ident()
    resume: Callable[[Any], Any] = call.send
    value: Any = None
    while True:
        start_s = time.perf_counter()
        _current[thread] = Interval(who, start_s)
        try:
            awaited = resume(value)
        except StopIteration as end:
            return end.value
        finally:
            _current.pop(thread, None)
            on_interval(time.perf_counter() - start_s)
        try:
            value = yield awaited
            resume = call.send
        except BaseException as error:  # the coroutine must also see cancellation
            value = error
            resume = call.throw


@contextlib.contextmanager
def watched(who: Callable[[], str]) -> Iterator[None]:
    """Warn while the block holds the event loop."""
    _start_watching()
    thread = threading.get_ident()
    _current[thread] = Interval(who, time.perf_counter())
    try:
        yield
    finally:
        _current.pop(thread, None)


@functools.cache
def _start_watching() -> None:
    """Once per process."""
    threading.Thread(target=_watch, name="event loop watch", daemon=True).start()


def _watch() -> None:
    last: dict[int, Interval] = {}  # by thread
    warnings: dict[int, int] = {}  # by thread: how many for its last interval
    while True:
        time.sleep(CHECK_EVERY_S)
        for thread, interval in list(_current.items()):
            if interval is not last.get(thread):
                last[thread] = interval
                warnings[thread] = 0
            count = warnings[thread]
            blocked_s = time.perf_counter() - interval.start_s
            if count < len(WARN_AFTER_S) and blocked_s >= WARN_AFTER_S[count]:
                warnings[thread] += 1
                warn(
                    f"{interval.who()} has blocked the event loop for {blocked_s:.0f} s and still "
                    "does; every other episode waits"
                )


class LoopWatch:
    """Warns once of an environment that blocks the event loop at length or too often."""

    def __init__(self):
        self._warned = False
        self._window_start_s = time.perf_counter()
        self._blocked_s = 0.0  # within the window

    def add(self, name: str, method: str, interval_s: float) -> None:
        self._blocked_s += interval_s
        if interval_s >= BLOCKED_S:
            self._warn(
                f"environment {name}: {method}() blocked the event loop for {interval_s:.1f} s"
            )
        now_s = time.perf_counter()
        elapsed_s = now_s - self._window_start_s
        if elapsed_s < WINDOW_S:
            return
        if self._blocked_s >= MAX_BLOCKED_FRACTION * elapsed_s:
            self._warn(
                f"environment {name}: blocked the event loop for {self._blocked_s:.1f} of the "
                f"last {elapsed_s:.1f} s"
            )
        self._window_start_s = now_s
        self._blocked_s = 0.0

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"{problem}, and every other episode waited; await slow work or run it in a thread "
                "(megastep.rollout.env.in_thread)"
            )


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
