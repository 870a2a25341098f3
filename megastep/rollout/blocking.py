"""Blocking calls of environments, in a bounded set of daemon threads of this process.

A call waits while all threads are busy. A call that outlives its episode costs its thread: another
one replaces it, so that calls that never return do not take the place of others, and a warning
names the function. Daemon threads do not hold up the end of the program.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megastep.rollout.watch import warn


@dataclass(eq=False)
class _Call:
    function: Callable
    arguments: tuple
    future: asyncio.Future
    loop: asyncio.AbstractEventLoop
    is_running: bool = False
    is_abandoned: bool = False

    def notify(self, setter: Callable, value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
            self.loop.call_soon_threadsafe(lambda: self.future.done() or setter(value))


class BlockingCalls:
    def __init__(self, limit: int = 256):
        self.limit = limit  # threads; rollout.env_threads
        self._waiting: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._threads = 0  # without those of abandoned calls
        self._idle = 0
        self._peak = 0

    async def run(self, function: Callable, *arguments) -> Any:
        """The result of `function(*arguments)`, which runs in one of the threads."""
        loop = asyncio.get_running_loop()
        call = _Call(function, arguments, loop.create_future(), loop)
        self._submit(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    def peak_waiting(self) -> int:
        """The most calls that waited for a thread at a time, since the last call of this method."""
        with self._changed:
            peak = self._peak
            self._peak = len(self._waiting)
        return peak

    def _submit(self, call: _Call) -> None:
        with self._changed:
            self._waiting.append(call)
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._threads < self.limit:
                self._start_thread()
            else:
                self._peak = max(self._peak, len(self._waiting))

    def _start_thread(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="env", daemon=True).start()

    def _abandon(self, call: _Call) -> None:
        with self._changed:
            if not call.is_running:
                if call in self._waiting:
                    self._waiting.remove(call)
                return
            call.is_abandoned = True
            self._threads -= 1
            if self._waiting:
                self._start_thread()
        name = getattr(call.function, "__qualname__", repr(call.function))
        warn(f"{name}: still runs after its time limit; another thread replaces its own")

    def _work(self) -> None:
        with self._changed:
            self._idle += 1
        while True:
            call = self._next_call()
            setter, value = _outcome(call)
            with self._changed:
                call.is_running = False
                if call.is_abandoned:
                    return  # its replacement works
                self._idle += 1  # before the answer: the caller's next call finds this thread
            call.notify(setter, value)

    def _next_call(self) -> _Call:
        with self._changed:
            while not self._waiting:
                self._changed.wait()
            self._idle -= 1
            call = self._waiting.popleft()
            call.is_running = True
        return call


def _outcome(call: _Call) -> tuple[Callable, Any]:
    """The method of the future to call, and its argument."""
    try:
        return call.future.set_result, call.function(*call.arguments)
    except StopIteration as error:  # a future cannot hold it
        return call.future.set_exception, RuntimeError(repr(error))
    except BaseException as error:  # SystemExit too: the thread must live on
        return call.future.set_exception, error


calls = BlockingCalls()  # of this process
