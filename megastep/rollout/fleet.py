"""All engines behind one `generate`: calls of a session stay together, others are balanced, dead engines come back.

    call ── session known and its engine serves? ── that engine (it has the prefix in its cache)
        └── else ── the serving engine with the fewest calls in flight

    engine: starting ── (weights) ──► serving ──► lost ── restarts left? ──► starting
                                                       └─ else gone

Invariants, held by the tests:

    every call is answered once: it is asked again only after the engine that had it has been killed;
    no engine serves before it has the weights of the policy;
    when every engine is gone, the calls that wait end with an error instead of waiting for ever.

The fleet lives in a thread with an event loop of its own, so `generate` can be awaited from any loop, and engines are
looked after between the caller's loops too.
"""

import asyncio
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from megastep.config import EngineConfig
from megastep.errors import EngineError
from megastep.rollout.generation import Generation, Sampling

_GONE = (
    RayActorError,
    OutOfMemoryError,
)  # Ray kills actors where memory runs out, and does not call that a death
_SESSIONS_KEPT = 1 << 16  # the oldest are forgotten; their next call just misses a cache


@dataclass(eq=False)
class EngineSlot:
    """One engine's place in the fleet; the actor in it may be replaced."""

    index: int
    handle: Any  # Ray actor
    serving: bool = False
    in_flight: int = 0
    restarts: int = 0
    pid: int | None = None
    lost_why: str = ""
    task: asyncio.Task | None = None  # that watches it, or brings it back


class Fleet:
    """`spawn(index)` starts an actor; `refresh(handle, serve)` gives it the policy's weights and then calls `serve`;
    None: it has its own."""

    def __init__(
        self,
        spawn: Callable[[int], Any],
        settings: EngineConfig,
        refresh: Callable[[Any, Callable[[], None]], None] | None = None,
        log: str | None = None,
    ):
        self._spawn, self._settings, self._refresh = spawn, settings, refresh
        self._log = log  # where the engines say more
        self._sessions: OrderedDict[str, EngineSlot] = OrderedDict()
        self._names = itertools.count()
        self._closing = False
        self.slots = [EngineSlot(index, spawn(index)) for index in range(settings.num_engines)]
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()  # an engine began to serve, or is gone
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Wait until every engine is built. They serve from the first `open` on."""
        self._run(self._start())

    def open(self) -> None:
        """Engines have their weights: let them serve, and look after them from now on."""
        self._run(self._open())

    async def generate(
        self,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        routing_version: int | None = None,
    ) -> Generation:
        """See `generation.Generate`."""
        call = self._generate(
            np.asarray(prompt_ids, np.int32), sampling, session, (routing_start, routing_version)
        )
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def serving(self) -> list[Any]:
        """The actors that answer calls now."""
        return [slot.handle for slot in self.slots if slot.serving]

    def pause(self, finish_calls: bool = False) -> None:
        """Freeze every call in flight, or let it finish; calls that come meanwhile wait."""
        self._run(self._each("pause", finish_calls))

    def resume(self) -> None:
        self._run(self._each("resume"))

    def sleep(self) -> None:
        """Give up the GPUs' memory to the policy; nothing where engines have GPUs of their own, or there are none."""
        self._run(self._each("sleep"))

    def wake(self, what: str) -> None:
        self._run(self._each("wake", what))

    def close(self) -> None:
        """Calls in flight end with an error."""
        self._closing = True
        for slot in self.slots:
            ray.kill(slot.handle)
        self._run(self._drop_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    async def _drop_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ------------------------------------------------------------ calls

    async def _generate(
        self,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        session: str,
        routing: tuple[int, int | None],
    ) -> Generation:
        while True:
            slot = await self._choose(session)
            handle = slot.handle
            # A name of its own for each attempt: an engine that is asked twice would confuse the two.
            reference = handle.generate.remote(
                prompt_ids, sampling, f"call-{next(self._names)}", *routing
            )
            slot.in_flight += 1
            try:
                return await asyncio.wait_for(_result(reference), self._settings.request_timeout_s)
            except _GONE as error:
                await self._lose(slot, handle, _how_it_ended(error))
            except RayTaskError as error:
                raise EngineError(f"an engine refused a call: {error.cause}") from None
            except TimeoutError:
                timeout = self._settings.request_timeout_s
                await self._lose(slot, handle, f"no answer in engine.request_timeout_s = {timeout}")
            except asyncio.CancelledError:
                ray.cancel(reference)
                raise
            finally:
                slot.in_flight -= 1

    async def _choose(self, session: str) -> EngineSlot:
        async with self._changed:
            await self._changed.wait_for(
                lambda: any(s.serving for s in self.slots) or self._all_gone()
            )
        if self._all_gone():
            reasons = "; ".join(f"{slot.index}: {slot.lost_why}" for slot in self.slots)
            raise EngineError(
                f"every engine is gone: {reasons}" + (f"; see {self._log}" if self._log else "")
            )
        slot = self._sessions.get(session)
        if slot is None or not slot.serving:
            slot = min((s for s in self.slots if s.serving), key=lambda s: (s.in_flight, s.index))
        self._sessions[session] = slot
        self._sessions.move_to_end(session)
        if len(self._sessions) > _SESSIONS_KEPT:
            self._sessions.popitem(last=False)
        return slot

    def _all_gone(self) -> bool:
        return all(not s.serving and s.restarts > self._settings.restarts for s in self.slots)

    # ------------------------------------------------------------ engines

    async def _start(self) -> None:
        await asyncio.gather(*(self._build(slot) for slot in self.slots))

    async def _build(self, slot: EngineSlot) -> None:
        timeout = self._settings.start_timeout_s
        try:
            slot.pid = await asyncio.wait_for(_result(slot.handle.start.remote()), timeout)
        except TimeoutError:
            raise EngineError(
                f"engine {slot.index} did not start in engine.start_timeout_s = {timeout}"
            ) from None

    async def _open(self) -> None:
        for slot in self.slots:
            self._serve(slot)
        async with self._changed:
            self._changed.notify_all()

    def _serve(self, slot: EngineSlot) -> None:
        slot.serving = True
        slot.task = asyncio.ensure_future(self._watch(slot, slot.handle))

    async def _watch(self, slot: EngineSlot, handle: Any) -> None:
        """Ask after the engine's health until it is lost."""
        while slot.serving and slot.handle is handle:
            await asyncio.sleep(self._settings.health_every_s)
            try:
                await asyncio.wait_for(
                    _result(handle.check.remote()), self._settings.health_timeout_s
                )
            except _GONE as error:
                await self._lose(slot, handle, _how_it_ended(error))
            except RayTaskError as error:
                await self._lose(slot, handle, f"its health check failed: {error.cause}")
            except TimeoutError:
                await self._lose(slot, handle, "it did not answer a health check")

    async def _lose(self, slot: EngineSlot, handle: Any, why: str) -> None:
        """Kill the actor, so that it cannot answer any more, and begin again with a new one."""
        if slot.handle is not handle or not slot.serving or self._closing:
            return  # another call has noticed before
        slot.serving, slot.lost_why = False, why
        ray.kill(handle)
        slot.task = asyncio.ensure_future(self._come_back(slot))

    async def _come_back(self, slot: EngineSlot) -> None:
        while slot.restarts < self._settings.restarts and not self._closing:
            slot.restarts += 1
            try:
                slot.handle = self._spawn(slot.index)
                await self._build(slot)
                await self._join(slot)
            except (
                Exception
            ) as error:  # whatever keeps an engine from starting: try again, as often as allowed
                slot.lost_why = f"did not restart: {error}"
                ray.kill(slot.handle)
            else:
                break
        else:
            slot.restarts = self._settings.restarts + 1
        async with self._changed:
            self._changed.notify_all()

    async def _join(self, slot: EngineSlot) -> None:
        """Serve, with the policy's weights. `refresh` calls back before it lets the next push begin, which then knows
        this engine."""
        if self._refresh is None:
            return self._serve(slot)

        async def serve() -> None:
            self._serve(slot)

        def serve_now() -> None:
            """In the thread of `refresh`, which must not outlive a fleet that closes."""
            if not self._closing:
                asyncio.run_coroutine_threadsafe(serve(), self._loop).result(timeout=10)

        await asyncio.get_running_loop().run_in_executor(
            None, self._refresh, slot.handle, serve_now
        )

    async def _each(self, method: str, *arguments) -> None:
        """Call the engines that serve; one that dies meanwhile is lost, not an error."""

        async def one(slot: EngineSlot) -> None:
            handle, timeout = slot.handle, self._settings.request_timeout_s
            try:
                await asyncio.wait_for(_result(getattr(handle, method).remote(*arguments)), timeout)
            except _GONE as error:
                await self._lose(slot, handle, _how_it_ended(error))
            except TimeoutError:
                await self._lose(
                    slot, handle, f"no answer to {method} in engine.request_timeout_s = {timeout}"
                )

        await asyncio.gather(*(one(slot) for slot in self.slots if slot.serving))


def _how_it_ended(error: Exception) -> str:
    why = ": Ray killed it because memory ran out" if isinstance(error, OutOfMemoryError) else ""
    return f"its process ended{why}"


async def _result(reference) -> Any:
    return await reference
