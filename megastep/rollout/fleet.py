"""All engines behind one `generate`: routing by session, load balancing, restart of dead engines.

    call ── session known and its engine serves? ── that engine (it has the prefix in its cache)
        └── else ── the serving engine with the fewest calls in flight

    engine: starting ── (weights) ──► serving ──► lost ── restarts left? ──► starting
                                                       └─ else gone

Invariants, held by the tests:

    Every call is answered once: it is retried only after its engine has been killed.
    No engine serves before it has the policy's weights.
    When every engine is gone, waiting calls raise instead of blocking forever.

The fleet runs in a thread with its own event loop, so that `generate` can be awaited from any loop
and health checks continue between the caller's loops.
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

# OutOfMemoryError: Ray killed the actor for memory; it is no RayActorError.
_ACTOR_DIED = (RayActorError, OutOfMemoryError)
_MAX_SESSIONS = 1 << 16  # the oldest are evicted; their next call may miss the prefix cache


@dataclass(eq=False)
class EngineSlot:
    """One engine of the fleet; a restart replaces its actor."""

    index: int
    handle: Any  # Ray actor
    serving: bool = False
    in_flight: int = 0
    restarts: int = 0
    pid: int | None = None
    lost_reason: str = ""
    task: asyncio.Task | None = None  # health checks, or the restart


class Fleet:
    """`spawn(index)` starts an actor; `refresh(handle, serve)` syncs the policy's weights to it and
    then calls `serve`; None: engines load their own weights."""

    def __init__(
        self,
        spawn: Callable[[int], Any],
        settings: EngineConfig,
        refresh: Callable[[Any, Callable[[], None]], None] | None = None,
        log: str | None = None,
    ):
        self._spawn = spawn
        self._settings = settings
        self._refresh = refresh
        self._log = log  # of the engines, named in errors
        self._sessions: OrderedDict[str, EngineSlot] = OrderedDict()
        self._call_numbers = itertools.count()
        self._closing = False
        self.slots = [EngineSlot(index, spawn(index)) for index in range(settings.num_engines)]
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()  # notified when an engine serves or is gone
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Wait until every engine is built. `open` makes them serve."""
        self._run(self._start())

    def open(self) -> None:
        """Serve and start health checks; the engines must have their weights."""
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
        """The actors that serve."""
        return [slot.handle for slot in self.slots if slot.serving]

    def pause(self, finish_calls: bool = False) -> None:
        """Freeze calls in flight, or let them finish; new calls wait."""
        self._run(self._each("pause", finish_calls))

    def resume(self) -> None:
        self._run(self._each("resume"))

    def sleep(self) -> None:
        """Free the GPU memory shared with the policy; no effect unless colocated on GPUs."""
        self._run(self._each("sleep"))

    def wake(self, what: str) -> None:
        self._run(self._each("wake", what))

    def call(self, handles: list[Any], method: str, *arguments) -> None:
        """Call engines that do not serve yet; raises if one dies or does not answer."""
        self._run(self._call(handles, method, *arguments))

    def close(self) -> None:
        """Calls in flight raise."""
        self._closing = True
        for slot in self.slots:
            ray.kill(slot.handle)
        self._run(self._cancel_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    async def _cancel_tasks(self) -> None:
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
            slot = await self._route(session)
            handle = slot.handle
            # A new name per attempt: vLLM needs unique request ids.
            name = f"call-{next(self._call_numbers)}"
            reference = handle.generate.remote(prompt_ids, sampling, name, *routing)
            slot.in_flight += 1
            try:
                return await asyncio.wait_for(_result(reference), self._settings.request_timeout_s)
            except _ACTOR_DIED as error:
                await self._lose(slot, handle, _end_reason(error))
            except RayTaskError as error:
                raise EngineError(f"an engine rejected a call: {error.cause}") from None
            except TimeoutError:
                timeout_s = self._settings.request_timeout_s
                await self._lose(
                    slot, handle, f"no answer in engine.request_timeout_s = {timeout_s}"
                )
            except asyncio.CancelledError:
                ray.cancel(reference)
                raise
            finally:
                slot.in_flight -= 1

    async def _route(self, session: str) -> EngineSlot:
        """The session's engine, else the one with the fewest calls in flight."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: any(s.serving for s in self.slots) or self._all_gone()
            )
        if self._all_gone():
            reasons = "; ".join(f"{slot.index}: {slot.lost_reason}" for slot in self.slots)
            logs = f"; logs: {self._log}" if self._log else ""
            raise EngineError(f"every engine is gone: {reasons}{logs}")
        slot = self._sessions.get(session)
        if slot is None or not slot.serving:
            serving = [s for s in self.slots if s.serving]
            slot = min(serving, key=lambda s: (s.in_flight, s.index))
        self._sessions[session] = slot
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return slot

    def _all_gone(self) -> bool:
        return all(not s.serving and s.restarts > self._settings.restarts for s in self.slots)

    # ------------------------------------------------------------ engines

    async def _start(self) -> None:
        await asyncio.gather(*(self._build(slot) for slot in self.slots))

    async def _build(self, slot: EngineSlot) -> None:
        timeout_s = self._settings.start_timeout_s
        try:
            slot.pid = await asyncio.wait_for(_result(slot.handle.start.remote()), timeout_s)
        except TimeoutError:
            raise EngineError(
                f"engine {slot.index} did not start in engine.start_timeout_s = {timeout_s}"
            ) from None

    async def _open(self) -> None:
        for slot in self.slots:
            self._serve(slot)
        async with self._changed:
            self._changed.notify_all()

    def _serve(self, slot: EngineSlot) -> None:
        slot.serving = True
        slot.task = asyncio.ensure_future(self._check_health(slot, slot.handle))

    async def _check_health(self, slot: EngineSlot, handle: Any) -> None:
        """Repeat until the engine is lost."""
        while slot.serving and slot.handle is handle:
            await asyncio.sleep(self._settings.health_every_s)
            try:
                await asyncio.wait_for(
                    _result(handle.check.remote()), self._settings.health_timeout_s
                )
            except _ACTOR_DIED as error:
                await self._lose(slot, handle, _end_reason(error))
            except RayTaskError as error:
                await self._lose(slot, handle, f"its health check failed: {error.cause}")
            except TimeoutError:
                await self._lose(slot, handle, "it did not answer a health check")

    async def _lose(self, slot: EngineSlot, handle: Any, reason: str) -> None:
        """Kill the actor, so that it answers no call twice, and restart the engine."""
        if slot.handle is not handle or not slot.serving or self._closing:
            return  # already lost by another call, or closing
        slot.serving = False
        slot.lost_reason = reason
        ray.kill(handle)
        slot.task = asyncio.ensure_future(self._restart(slot))

    async def _restart(self, slot: EngineSlot) -> None:
        while slot.restarts < self._settings.restarts and not self._closing:
            slot.restarts += 1
            try:
                slot.handle = self._spawn(slot.index)
                await self._build(slot)
                await self._join(slot)
            except Exception as error:  # any failure: retry until engine.restarts is reached
                slot.lost_reason = f"did not restart: {error}"
                ray.kill(slot.handle)
            else:
                break
        else:
            slot.restarts = self._settings.restarts + 1
        async with self._changed:
            self._changed.notify_all()

    async def _join(self, slot: EngineSlot) -> None:
        """Serve with the policy's weights. `refresh` calls `serve_now` before the next weight sync
        can start, which then includes this engine."""
        if self._refresh is None:
            return self._serve(slot)

        async def serve() -> None:
            self._serve(slot)

        def serve_now() -> None:
            """Called in the thread of `refresh`, which must not block a closing fleet."""
            if not self._closing:
                asyncio.run_coroutine_threadsafe(serve(), self._loop).result(timeout=10)

        await asyncio.get_running_loop().run_in_executor(
            None, self._refresh, slot.handle, serve_now
        )

    async def _call(self, handles: list[Any], method: str, *arguments) -> None:
        timeout_s = self._settings.request_timeout_s
        calls = [_result(getattr(handle, method).remote(*arguments)) for handle in handles]
        try:
            await asyncio.wait_for(asyncio.gather(*calls), timeout_s)
        except TimeoutError:
            raise EngineError(
                f"an engine did not answer to {method} in engine.request_timeout_s = {timeout_s}"
            ) from None

    async def _each(self, method: str, *arguments) -> None:
        """Call every serving engine; one that dies is lost and raises nothing."""

        async def one(slot: EngineSlot) -> None:
            handle = slot.handle
            timeout_s = self._settings.request_timeout_s
            try:
                reference = getattr(handle, method).remote(*arguments)
                await asyncio.wait_for(_result(reference), timeout_s)
            except _ACTOR_DIED as error:
                await self._lose(slot, handle, _end_reason(error))
            except TimeoutError:
                reason = f"no answer to {method} in engine.request_timeout_s = {timeout_s}"
                await self._lose(slot, handle, reason)

        await asyncio.gather(*(one(slot) for slot in self.slots if slot.serving))


def _end_reason(error: Exception) -> str:
    if isinstance(error, OutOfMemoryError):
        return "its process ended: Ray killed it because memory ran out"
    return "its process ended"


async def _result(reference) -> Any:
    return await reference
