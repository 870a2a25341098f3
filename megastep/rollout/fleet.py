"""The engines' life: start, health, weight versions, restart. `router.py` sends calls to them.

    engine: starting ──► stale ── (weight sync) ──► serving ──► lost ── restarts left? ──► starting
                                                                     └─ else gone, for a while

A lost engine is killed first, then reported to the routers, which retry its calls. An engine is
lost when its process ends, when a health check fails, or when it has calls and makes no progress
with any of them for engine.progress_timeout_s; a slow call is no reason. A restarted engine is
stale: it joins the next weight sync, or gets one of its own if no engine serves.

Invariants, held by the tests:

    No engine serves before it has the policy's weights.
    An engine that fails in pause, resume, sleep or wake is lost; the run continues.
    `engine.restarts` counts the restarts of the last hour, so that a long run has as many again.

The fleet runs in a thread with its own event loop, so that `generate` can be awaited from any loop
and health checks continue between the caller's loops.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

from megastep.config import EngineConfig
from megastep.errors import EngineError, PolicyLost
from megastep.rollout.engine import Progress
from megastep.rollout.generation import Generation, Sampling, Session
from megastep.rollout.router import ACTOR_DIED, EngineId, Engines, Lost, Router, end_reason

RESTART_WINDOW_S = 3600.0


@dataclass(eq=False)
class EngineSlot:
    """One engine of the fleet; a restart replaces its actor."""

    index: int
    handle: Any  # Ray actor
    starts: int = 1
    serving: bool = False
    stale: bool = False  # built, without the policy's weights
    gone: bool = False  # has no restarts left
    restarted_s: list[float] = field(default_factory=list)  # times of the last restarts
    pid: int | None = None
    lost_reason: str = ""
    progress: Progress = Progress()  # at the last health check
    task: asyncio.Task | None = None  # health checks, or the restart

    @property
    def id(self) -> EngineId:
        return EngineId(self.index, self.starts)

    @property
    def restarts(self) -> int:
        return self.starts - 1


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
        self._closing = False
        self.slots = [EngineSlot(index, spawn(index)) for index in range(settings.num_engines)]
        self._loop = asyncio.new_event_loop()
        self.router = Router(settings, self.report)  # of calls from this process
        self._listeners: list[Callable[[Engines], None]] = [self.router.update]
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
        session: Session,
        routing_start: int = 0,
        routing_version: int | None = None,
    ) -> Generation:
        """See `generation.Generate`."""
        call = self.router.generate(
            prompt_ids,
            sampling,
            session=session,
            routing_start=routing_start,
            routing_version=routing_version,
        )
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def listen(self, listener: Callable[[Engines], None]) -> None:
        """Call `listener` now and whenever another set of engines serves, in the fleet's thread."""

        async def add() -> None:
            self._listeners.append(listener)
            listener(self._engines())

        self._run(add())

    def submit(self, coroutine: Coroutine) -> None:
        """Run a coroutine in the fleet's thread until the fleet closes."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def report(self, lost: Lost) -> None:
        """A router's call failed: kill the engine, unless it is already another one."""

        async def lose() -> None:
            slot = self.slots[lost.engine.slot]
            if slot.id == lost.engine:
                self._lose(slot, lost.reason)

        self.submit(lose())

    def ready(self) -> list[Any]:
        """The actors that a weight sync reaches: those that serve, and stale ones."""
        return [slot.handle for slot in self.slots if slot.serving or slot.stale]

    def serving(self) -> list[Any]:
        """The actors that serve."""
        return [slot.handle for slot in self.slots if slot.serving]

    def serve(self, handles: list[Any]) -> None:
        """Stale engines among these have the policy's weights now."""
        self._run(self._serve_stale(handles))

    def pause(self, finish_calls: bool = False) -> None:
        """Freeze calls in flight, or let them finish; new calls wait."""
        timeout_s = self._settings.request_timeout_s if finish_calls else None
        self._run(self._each("pause", finish_calls, timeout_s=timeout_s))

    def resume(self) -> None:
        self._run(self._each("resume"))

    def sleep(self) -> None:
        """Free the GPU memory shared with the policy; no effect unless colocated on GPUs."""
        self._run(self._each("sleep"))

    def wake(self, what: str) -> None:
        self._run(self._each("wake", what))

    def abandon_sync(self) -> None:
        """End a weight sync whose sender died; no effect on engines that are in none."""
        self._run(self._each("abandon_weight_update"))

    def call(self, handles: list[Any], method: str, *arguments) -> None:
        """Call engines that do not serve yet; raises if one dies or does not answer."""
        self._run(self._call(handles, method, *arguments))

    def metrics(self) -> dict[str, float]:
        limit = self._settings.max_sequences
        return {
            "engine/serving": sum(slot.serving for slot in self.slots),
            "engine/restarts": sum(slot.restarts for slot in self.slots),
            "engine/queued": sum(max(0, slot.progress.running - limit) for slot in self.slots),
        }

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

    # ------------------------------------------------------------ what routers know

    def _engines(self) -> Engines:
        serving = {slot.id: slot.handle for slot in self.slots if slot.serving}
        if not all(slot.gone for slot in self.slots):
            return Engines(serving)
        reasons = "; ".join(f"{slot.index}: {slot.lost_reason}" for slot in self.slots)
        logs = f"; logs: {self._log}" if self._log else ""
        return Engines(serving, gone=reasons + logs)

    def _publish(self) -> None:
        engines = self._engines()
        for listener in self._listeners:
            listener(engines)

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
            slot.task = asyncio.ensure_future(self._check_health(slot, slot.id))
            self._serve(slot)

    def _serve(self, slot: EngineSlot) -> None:
        slot.serving = True
        slot.stale = False
        self._publish()

    async def _serve_stale(self, handles: list[Any]) -> None:
        for slot in self.slots:
            if slot.stale and slot.handle in handles:
                self._serve(slot)

    async def _check_health(self, slot: EngineSlot, engine: EngineId) -> None:
        """Repeat until the engine is lost."""
        watch = ProgressWatch(self._settings.progress_timeout_s)
        while (slot.serving or slot.stale) and slot.id == engine:
            await asyncio.sleep(self._settings.health_every_s)
            problem = None
            try:
                slot.progress = await asyncio.wait_for(
                    _result(slot.handle.check.remote()), self._settings.health_timeout_s
                )
                if watch.is_stuck(slot.progress):
                    timeout_s = self._settings.progress_timeout_s
                    problem = f"no progress in engine.progress_timeout_s = {timeout_s}"
            except ACTOR_DIED as error:
                problem = end_reason(error)
            except RayTaskError as error:
                problem = f"its health check failed: {error.cause}"
            except TimeoutError:
                problem = "it did not answer a health check"
            if problem is not None and slot.id == engine:
                self._lose(slot, problem)

    def _lose(self, slot: EngineSlot, reason: str) -> None:
        """Kill the actor, so that it answers no call twice, and restart the engine."""
        if not (slot.serving or slot.stale) or self._closing:
            return  # already lost, or closing
        slot.serving = False
        slot.stale = False
        slot.lost_reason = reason
        ray.kill(slot.handle)
        slot.task = asyncio.ensure_future(self._restart(slot))
        self._publish()
        self._refresh_if_none_serves()

    async def _restart(self, slot: EngineSlot) -> None:
        while not self._closing:
            await self._wait_for_a_restart(slot)
            slot.starts += 1
            slot.restarted_s.append(time.monotonic())
            try:
                slot.handle = self._spawn(slot.index)
                await self._build(slot)
            except PolicyLost:  # no rank would send it weights; new ones are on their way
                slot.starts -= 1
                slot.restarted_s.pop()
                await asyncio.sleep(self._settings.health_every_s)
                continue
            except Exception as error:  # any failure counts as a restart
                slot.lost_reason = f"did not restart: {error}"
                ray.kill(slot.handle)
                continue
            slot.task = asyncio.ensure_future(self._check_health(slot, slot.id))
            if self._refresh is None:
                return self._serve(slot)
            slot.stale = True
            return self._refresh_if_none_serves()

    async def _wait_for_a_restart(self, slot: EngineSlot) -> None:
        """Returns when fewer than engine.restarts happened in the last RESTART_WINDOW_S."""
        budget = self._settings.restarts
        while True:
            since_s = time.monotonic() - RESTART_WINDOW_S
            slot.restarted_s = [at_s for at_s in slot.restarted_s if at_s > since_s]
            if len(slot.restarted_s) < budget:
                slot.gone = False
                return
            if not slot.gone:
                slot.gone = True
                self._publish()
            if budget == 0:
                await asyncio.get_running_loop().create_future()  # until the fleet closes
            await asyncio.sleep(slot.restarted_s[0] - since_s)

    def _refresh_if_none_serves(self) -> None:
        """Calls wait for an engine, and the next weight sync may wait for those calls."""
        stale = next((slot for slot in self.slots if slot.stale), None)
        if stale is not None and not self.serving():
            self.submit(self._refresh_slot(stale, stale.id))

    async def _refresh_slot(self, slot: EngineSlot, engine: EngineId) -> None:
        """Serve with the policy's weights. `refresh` calls `serve_now` before the next weight sync
        can start, which then includes this engine."""
        assert self._refresh is not None

        async def serve() -> None:
            if slot.stale and slot.id == engine:
                self._serve(slot)

        def serve_now() -> None:
            """Called in the thread of `refresh`, which must not block a closing fleet."""
            if not self._closing:
                asyncio.run_coroutine_threadsafe(serve(), self._loop).result(timeout=10)

        try:
            await asyncio.get_running_loop().run_in_executor(
                None, self._refresh, slot.handle, serve_now
            )
        except PolicyLost:
            return  # the weight sync of the new policy includes it
        except Exception as error:
            if slot.id == engine:
                self._lose(slot, f"did not get its weights: {error}")

    async def _call(self, handles: list[Any], method: str, *arguments) -> None:
        timeout_s = self._settings.health_timeout_s
        calls = [_result(getattr(handle, method).remote(*arguments)) for handle in handles]
        try:
            await asyncio.wait_for(asyncio.gather(*calls), timeout_s)
        except TimeoutError:
            raise EngineError(
                f"an engine did not answer to {method} in engine.health_timeout_s = {timeout_s}"
            ) from None

    async def _each(self, method: str, *arguments, timeout_s: float | None = None) -> None:
        """Call every engine that is built; one that dies, fails or hangs is lost."""
        timeout_s = timeout_s or self._settings.health_timeout_s

        async def one(slot: EngineSlot) -> None:
            engine = slot.id
            try:
                reference = getattr(slot.handle, method).remote(*arguments)
                return await asyncio.wait_for(_result(reference), timeout_s)
            except ACTOR_DIED as error:
                reason = end_reason(error)
            except RayTaskError as error:
                reason = f"{method} failed: {error.cause}"
            except TimeoutError:
                reason = f"no answer to {method} in {timeout_s:g} s"
            if slot.id == engine:
                self._lose(slot, reason)

        await asyncio.gather(*(one(slot) for slot in self.slots if slot.serving or slot.stale))


class ProgressWatch:
    """Whether an engine with calls has sampled and answered nothing for too long."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._last: Progress | None = None
        self._since_s = time.monotonic()

    def is_stuck(self, progress: Progress) -> bool:
        works = progress.running > 0 and not progress.paused
        if not works or self._last is None or progress.tokens != self._last.tokens:
            self._since_s = time.monotonic()
        self._last = progress
        return time.monotonic() - self._since_s > self._timeout_s


async def _result(reference) -> Any:
    return await reference
