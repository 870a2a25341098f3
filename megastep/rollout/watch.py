"""How long environments hold the event loop. All episodes share it: while one computes or sleeps in it, none goes on.

A coroutine runs in stretches, from one await to the next. `timed` drives it as `await` does and measures each of them.
"""

import sys
import time
import types
from collections.abc import Callable, Coroutine

STRETCH_S = 0.5  # a stretch of this length blocks; less may be the machine's
WINDOW_S = 10.0
SHARE = 0.5  # of the time, in however short stretches


@types.coroutine
def timed(call: Coroutine, on_stretch: Callable[[float], None]):
    """The result of `call`; `on_stretch` hears the seconds of each stretch."""
    proceed, value = call.send, None
    while True:
        begin = time.perf_counter()
        try:
            awaited = proceed(value)
        except StopIteration as end:
            return end.value
        finally:
            on_stretch(time.perf_counter() - begin)
        try:
            proceed, value = call.send, (yield awaited)
        except BaseException as error:  # cancellation, too, is the coroutine's to see
            proceed, value = call.throw, error


class LoopWatch:
    """Warns, once, of an environment that holds the loop for long at a stretch or for most of the time."""

    def __init__(self):
        self._warned = False
        self._window, self._held_s = time.perf_counter(), 0.0

    def add(self, name: str, method: str, stretch_s: float) -> None:
        self._held_s += stretch_s
        if stretch_s >= STRETCH_S:
            self._warn(f"environment {name}: {method}() held the event loop for {stretch_s:.1f} s at a stretch")
        elapsed = time.perf_counter() - self._window
        if elapsed < WINDOW_S:
            return
        if self._held_s >= SHARE * elapsed:
            self._warn(f"environment {name}: held the event loop for {self._held_s:.1f} of the last {elapsed:.1f} s")
        self._window, self._held_s = time.perf_counter(), 0.0

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn(f"{what}, and every other episode waited; await what takes long, or put it in a thread "
                 "(megastep.rollout.env.in_thread)")


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
