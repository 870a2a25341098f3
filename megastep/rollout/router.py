"""Chooses an engine for each model call, in the process that runs the episode.

    call ── the session's engine serves? ─────────── that engine (it has the prefix in its cache)
        ├── the group's engine serves, with room? ── that engine (it has the prompt in its cache)
        └── else ─────────────────────────────────── the one with the fewest calls of this router

The fleet owns the engines, and `update` names those that serve.

Invariants, held by the tests:

    Every call is answered once: it is retried only after the fleet has killed its engine.
    A call over engine.request_timeout_s is aborted; its engine and all other calls continue.
    When every engine is gone, waiting calls raise instead of blocking forever.
"""

import asyncio
import itertools
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from megastep.config import EngineConfig
from megastep.errors import EngineError
from megastep.rollout.generation import Generation, Sampling, Session

# OutOfMemoryError: Ray killed the actor for memory; it is no RayActorError.
ACTOR_DIED = (RayActorError, OutOfMemoryError)
# A group stays on its engine while the engine has at most this much more than its part of the
# calls: a prompt is prefilled once, and no engine idles while another has a queue.
GROUP_LOAD = 1.25
GROUP_CALLS = 4
_REMEMBERED = 1 << 16  # sessions and groups; the next call of an evicted one may miss the cache


class EngineId(NamedTuple):
    slot: int
    start: int  # a restarted engine is another one


@dataclass(frozen=True)
class Engines:
    """The fleet as routers know it."""

    serving: dict[EngineId, Any]  # Ray actors
    gone: str | None = None  # every engine is gone, for these reasons


class Lost(NamedTuple):
    """A router's report: a call to this engine failed as if its process had ended."""

    engine: EngineId
    reason: str


class Router:
    """Runs in one event loop; `update` is called in it. `report` may be called from it."""

    def __init__(
        self,
        settings: EngineConfig,
        report: Callable[[Lost], None],
        first: int = 0,
        cancel: Callable[[Any], None] | None = None,
    ):
        """first: the engine that gets the first call; routers should not all start with 0. cancel:
        aborts a call by its reference, by default Ray's."""
        self._timeout_s = settings.request_timeout_s
        self._report = report
        self._first = first
        self._cancel = cancel or ray.cancel
        self._engines = Engines({})
        self._changed = asyncio.Event()
        self._sessions: OrderedDict[Session, EngineId] = OrderedDict()
        self._groups: OrderedDict[str, EngineId] = OrderedDict()
        self.in_flight: Counter[EngineId] = Counter()
        # vLLM needs unique request ids, also after a restart of this process.
        self._names = (f"{secrets.token_hex(4)}-{n}" for n in itertools.count())

    def update(self, engines: Engines) -> None:
        self._engines = engines
        self._changed.set()
        self._changed = asyncio.Event()

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
        prompt_ids = np.asarray(prompt_ids, np.int32)
        while True:
            engine = await self._choose(session)
            # A new name per attempt.
            call = (prompt_ids, sampling, next(self._names), routing_start, routing_version)
            self.in_flight[engine] += 1
            try:
                return await self._call(engine, *call)
            except ACTOR_DIED as error:
                self._report(Lost(engine, end_reason(error)))
            finally:
                self.in_flight[engine] -= 1
            await self._killed(engine)

    async def _call(self, engine: EngineId, *arguments) -> Generation:
        reference = self._engines.serving[engine].generate.remote(*arguments)
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                return await reference
        except RayTaskError as error:
            raise EngineError(f"an engine rejected a call: {error.cause}") from None
        except (TimeoutError, asyncio.CancelledError):
            self._cancel(reference)  # vLLM aborts the call
            if not clock.expired():
                raise
            raise EngineError(
                f"no answer in engine.request_timeout_s = {self._timeout_s}; the call was aborted"
            ) from None

    async def _choose(self, session: Session) -> EngineId:
        while not self._engines.serving:
            if self._engines.gone is not None:
                raise EngineError(f"every engine is gone: {self._engines.gone}")
            await self._changed.wait()
        engine = self._sessions.get(session)
        if engine not in self._engines.serving:
            engine = self._engine_for_group(session.group)
        assert engine is not None
        _remember(self._sessions, session, engine)
        _remember(self._groups, session.group, engine)
        return engine

    def _engine_for_group(self, group: str) -> EngineId:
        serving = self._engines.serving
        engine = self._groups.get(group)
        calls = sum(self.in_flight[other] for other in serving)
        room = GROUP_LOAD * calls / len(serving) + GROUP_CALLS
        if engine is not None and engine in serving and self.in_flight[engine] < room:
            return engine

        engines = list(serving)
        first = self._first % len(engines)
        return min(engines[first:] + engines[:first], key=self.in_flight.__getitem__)

    async def _killed(self, engine: EngineId) -> None:
        """Wait until the fleet has killed the engine, so that it cannot answer a second time."""
        while engine in self._engines.serving:
            await self._changed.wait()


def end_reason(error: Exception) -> str:
    if isinstance(error, OutOfMemoryError):
        return "its process ended: Ray killed it because memory ran out"
    return "its process ended"


def _remember(table: OrderedDict, key: Any, engine: EngineId) -> None:
    table[key] = engine
    table.move_to_end(key)
    if len(table) > _REMEMBERED:
        table.popitem(last=False)
