"""Agent workers: episodes in several processes; the driver makes one call per episode.

    driver                                             worker.AgentWorker
    RemotePool.run_episode(prompt, index) ───────────► Env, renderer, Router ── generate ──► engines
                                          ◄─────────── Trajectory
    Fleet ── engines that serve ─────────────────────► Router
          ◄────────────────────────── a lost engine ──

All samples of a prompt run in one worker, which tokenizes the prompt once. A worker that dies costs
its running episodes only: the worker is restarted and they run again, with the same seeds.
Cancelling an episode closes its environment in the worker. An episode whose worker died
MAX_ATTEMPTS times under it is a failed trajectory: its environment may have killed them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from megastep.rollout.data import Prompt
from megastep.rollout.fleet import Fleet
from megastep.rollout.pool import Pool
from megastep.rollout.router import ACTOR_DIED, Engines, end_reason
from megastep.types import StopReason, Trajectory

MAX_ATTEMPTS = 3
EPISODES_PER_WORKER = 64  # of the default number of workers


def default_workers(concurrency: int, has_gpu: bool, spare_cpus: float) -> int:
    """On a laptop the driver runs the episodes: engines and ranks need the cores."""
    if not has_gpu:
        return 0
    wanted = -(-concurrency // EPISODES_PER_WORKER)
    return max(1, min(wanted, int(spare_cpus)))


@dataclass(eq=False)
class WorkerSlot:
    index: int
    handle: Any  # Ray actor
    restarts: int = 0


class Workers:
    """`spawn(index)` starts an actor."""

    def __init__(self, spawn: Callable[[int], Any], count: int, fleet: Fleet):
        self._spawn = spawn
        self._fleet = fleet
        self._engines = Engines({})
        self._closing = False
        self.slots = [WorkerSlot(index, spawn(index)) for index in range(count)]

    def start(self) -> None:
        """Wait until every worker runs, and connect them to the fleet."""
        ray.get([slot.handle.pid.remote() for slot in self.slots])
        self._fleet.listen(self._set_engines)
        for slot in self.slots:
            self._fleet.submit(self._relay_losses(slot.handle))

    def pool(self, local: Pool) -> "RemotePool":
        """The pool whose episodes run in the workers instead."""
        return RemotePool(local.samples_per_prompt, local.concurrency, local.label, self)

    def metrics(self) -> dict[str, float]:
        peaks = [slot.handle.peak_waiting.remote() for slot in self.slots]
        return {
            "worker/restarts": sum(slot.restarts for slot in self.slots),
            "worker/env_calls_waiting": max(map(_peak, peaks)),
        }

    def close(self) -> None:
        self._closing = True
        for slot in self.slots:
            ray.kill(slot.handle)

    async def run_episode(self, label: str, prompt: Prompt, index: int) -> Trajectory:
        slot = self.slots[prompt.id % len(self.slots)]
        for _ in range(MAX_ATTEMPTS):
            handle = slot.handle
            reference = handle.run_episode.remote(label, prompt, index)
            try:
                return await reference
            except ACTOR_DIED as error:
                reason = end_reason(error)
                self._restart(slot, handle)
            except asyncio.CancelledError:
                await _cancelled(handle, (label, prompt.id, index))
                raise
        return Trajectory(
            prompt.id,
            index,
            [],
            env_metrics={"error": f"its agent worker failed {MAX_ATTEMPTS} times: {reason}"},
            stop_reason=StopReason.ENV_ERROR,
        )

    def _restart(self, slot: WorkerSlot, handle: Any) -> None:
        if slot.handle is not handle or self._closing:
            return  # another episode has restarted it, or closing
        ray.kill(handle)
        slot.restarts += 1
        slot.handle = self._spawn(slot.index)
        slot.handle.set_engines.remote(self._engines)
        self._fleet.submit(self._relay_losses(slot.handle))

    def _set_engines(self, engines: Engines) -> None:
        self._engines = engines
        for slot in self.slots:
            slot.handle.set_engines.remote(engines)

    async def _relay_losses(self, handle: Any) -> None:
        """Until the worker dies."""
        while not self._closing:
            try:
                reports = await handle.lost_engines.remote()
            except ACTOR_DIED:
                return
            for lost in reports:
                self._fleet.report(lost)


def _peak(reference) -> int:
    """0 of a worker that died; its next episode restarts it."""
    try:
        return ray.get(reference)
    except ACTOR_DIED:
        return 0


async def _cancelled(handle: Any, key: tuple[str, int, int]) -> None:
    """Wait until the worker has closed the episode's environment."""
    try:
        await handle.cancel_episode.remote(key)
    except ACTOR_DIED:
        return


@dataclass
class RemotePool(Pool):
    samples_per_prompt: int
    concurrency: int
    label: str
    workers: Workers

    async def run_episode(self, prompt: Prompt, index: int) -> Trajectory:
        return await self.workers.run_episode(self.label, prompt, index)
