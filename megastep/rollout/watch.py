"""How long environments hold the event loop. All episodes share it: while one computes or sleeps in it, none goes on.

A coroutine runs in stretches, from one await to the next. `timed` drives it as `await` does and measures each of them.
A stretch that does not end is told of by a thread, which looks at the one that is open every LOOK_EVERY_S.
"""

import contextlib
import functools
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator

STRETCH_S = 0.5  # a stretch of this length blocks; less may be the machine's
WINDOW_S = 10.0
SHARE = 0.5  # of the time, in however short stretches
OPEN_S = (5.0, 60.0)  # ages at which a stretch that is still open is told of
LOOK_EVERY_S = 1.0

Stretch = tuple[Callable[[], str], float]  # who it is, and when it began
_open: dict[int, Stretch] = {}  # by thread: the stretch that its event loop is in


@types.coroutine
def timed(call: Coroutine, who: Callable[[], str], on_stretch: Callable[[float], None]):
    """The result of `call`; `on_stretch` hears the seconds of each stretch. `who` is asked if one does not end."""
    _start_watching()
    thread = threading.get_ident()
    proceed, value = call.send, None
    while True:
        begin = time.perf_counter()
        _open[thread] = (who, begin)
        try:
            awaited = proceed(value)
        except StopIteration as end:
            return end.value
        finally:
            _open.pop(thread, None)
            on_stretch(time.perf_counter() - begin)
        try:
            proceed, value = call.send, (yield awaited)
        except BaseException as error:  # cancellation, too, is the coroutine's to see
            proceed, value = call.throw, error


@contextlib.contextmanager
def open_stretch(who: Callable[[], str]) -> Iterator[None]:
    """What runs in the block is told of if it does not end."""
    _start_watching()
    thread = threading.get_ident()
    _open[thread] = (who, time.perf_counter())
    try:
        yield
    finally:
        _open.pop(thread, None)


@functools.cache
def _start_watching() -> None:
    """Once per process; a daemon, so that it holds up no end."""
    threading.Thread(target=_watch, name="event loop watch", daemon=True).start()


def _watch() -> None:
    told: dict[
        int, tuple[Stretch, int]
    ] = {}  # by thread: the last stretch, and how often it was told of
    while True:
        time.sleep(LOOK_EVERY_S)
        for thread, stretch in list(_open.items()):
            last, times = told.get(thread, (None, 0))
            times = times if stretch is last else 0
            told[thread] = (stretch, times)
            age_s = time.perf_counter() - stretch[1]
            if times < len(OPEN_S) and age_s >= OPEN_S[times]:
                told[thread] = (stretch, times + 1)
                warn(
                    f"{stretch[0]()} has held the event loop for {age_s:.0f} s and goes on; every other episode waits"
                )


class LoopWatch:
    """Warns, once, of an environment that holds the loop for long at a stretch or for most of the time."""

    def __init__(self):
        self._warned = False
        self._window, self._held_s = time.perf_counter(), 0.0

    def add(self, name: str, method: str, stretch_s: float) -> None:
        self._held_s += stretch_s
        if stretch_s >= STRETCH_S:
            self._warn(
                f"environment {name}: {method}() held the event loop for {stretch_s:.1f} s at a stretch"
            )
        elapsed = time.perf_counter() - self._window
        if elapsed < WINDOW_S:
            return
        if self._held_s >= SHARE * elapsed:
            self._warn(
                f"environment {name}: held the event loop for {self._held_s:.1f} of the last {elapsed:.1f} s"
            )
        self._window, self._held_s = time.perf_counter(), 0.0

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"{what}, and every other episode waited; await what takes long, or put it in a thread "
                "(megastep.rollout.env.in_thread)"
            )


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
