"""Simulated time: an event loop that jumps to its next timer when nothing else is left to do.

    stream = SimulatedStream(pool, prompts, batch, steps, ahead)    # a GroupStream
    with stream:
        taken = stream.take(0)           # returns at once, at a later simulated time
        stream.wait(90.0)                # the driver trains for 90 simulated seconds
        stream.now()

Time passes only while the driver's thread waits for the loop: what the driver computes itself takes
no simulated time, and the result does not depend on the speed of this machine.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from megastep.rollout.stream import GroupStream
from megastep.types import Group


class NothingHappens(Exception):
    """The driver waits, and no timer is left that could end its wait."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now_s = 0.0
        self._waits = 0  # calls that the driver waits for
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now_s

    async def while_driver_waits(self, coroutine: Coroutine) -> Any:
        """Await a coroutine of the driver, who waits for it: time passes meanwhile.

        It starts when all else of this instant is done, however fast the driver's thread was.
        """
        while self._ready:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        self._waits += 1
        try:
            return await coroutine
        finally:
            self._waits -= 1

    def jump(self) -> bool:
        """Advance to the next timer; False if the driver is not waiting."""
        if not self._waits:
            return False
        timers = self._scheduled  # type: ignore[attr-defined]
        if not timers:
            raise NothingHappens
        self._now_s = max(self._now_s, timers[0].when())
        return True


class _JumpingSelector(selectors.DefaultSelector):
    """Returns at once; other threads still wake the loop through its pipe."""

    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        return [] if self._loop.jump() else super().select(None)


class SimulatedStream(GroupStream):
    _loop: VirtualLoop

    def make_loop(self) -> VirtualLoop:
        return VirtualLoop()

    def submit(self, coroutine: Coroutine) -> Future:
        return super().submit(self._loop.while_driver_waits(coroutine))

    def wait(self, seconds: float) -> None:
        """The driver is busy for so long."""
        self.submit(asyncio.sleep(seconds)).result()

    def now(self) -> float:
        return self._loop.time()

    async def _cancel_tasks(self) -> None:
        """At the end no driver waits, but an environment that closes may need time."""
        await self._loop.while_driver_waits(super()._cancel_tasks())

    def complete_groups(self) -> list[Group]:
        """Groups that wait for training; called in the loop."""
        groups = [entry.group for entry in self._entries.values()]
        return [group for group in groups if group is not None]
