"""The control plane of a weight sync, on rank 0: calls of the engines, and which of them are lost.

The other ranks wait for rank 0 meanwhile, in collective calls that end the run after
RANKS_TIMEOUT_S. So the waits between two such calls have a common limit:

    sync.timeout_s                   all waits for engines in a sync
    + engine.health_timeout_s        until they return from an aborted nccl group; without a group,
                                     for the other engines after late ones used all of the time
    + engine.health_timeout_s        until they have abandoned that update

which config/checks.py compares with RANKS_TIMEOUT_S.
"""

import time
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from megastep.config import EngineConfig
from megastep.sync.nccl import Group

_DIED = (RayActorError, OutOfMemoryError)  # the second: Ray killed the actor for memory


class Engines:
    """An engine that dies, fails or hangs is dropped; the sync continues with the others."""

    def __init__(self, handles: list, version: int, settings: EngineConfig, timeout_s: float):
        self.handles = list(handles)
        self.version = version
        self.settings = settings
        self.group: Group | None = None  # aborted when an engine is lost
        self.allow(timeout_s)

    def allow(self, seconds: float) -> None:
        """The time for all waits from here on."""
        self._left_s = seconds
        self._extra_s = self.settings.health_timeout_s  # for the others, after late engines

    def call(self, method: str, *arguments) -> list:
        return self.collect(self.submit(method, *arguments))

    def submit(self, method: str, *arguments) -> list[tuple]:
        return [(handle, getattr(handle, method).remote(*arguments)) for handle in self.handles]

    def collect(self, calls: list[tuple]) -> list:
        """Results in order of completion, without those of engines that are lost or late.

        After the abort of the group the calls that it blocked get the time of a health check.
        """
        waiting = {reference: handle for handle, reference in calls}
        results = []
        deadline = time.monotonic() + self._left_s
        while waiting:
            ended, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            is_lost = not ended
            for reference in ended:
                handle = waiting.pop(reference)
                try:
                    results.append(ray.get(reference))
                except _DIED:
                    self._drop(handle)
                    is_lost = True
                except RayTaskError as error:
                    self._fail(handle, error)
                    is_lost = True
            if is_lost and self._abort_group():
                deadline = time.monotonic() + self.settings.health_timeout_s
            elif not ended:
                self._kill(list(waiting.values()))
                if self.group is None:
                    deadline = time.monotonic() + self._extra_s
                    self._extra_s = 0.0
                break
        self._left_s = max(0.0, deadline - time.monotonic())
        return results

    def _fail(self, handle: Any, error: RayTaskError) -> None:
        """Drop an engine that could not load, for example for lack of memory; the last one's error
        is that of the sync."""
        if self.handles == [handle]:
            self._abort_group()
            raise error
        self._kill([handle])

    def _abort_group(self) -> bool:
        """False: there is none, or not any more."""
        if self.group is None or self.group.is_aborted:
            return False
        self.group.abort()
        return True

    def _kill(self, handles: list) -> None:
        """Engines that hang or failed: they must not serve with half of the weights."""
        for handle in handles:
            ray.kill(handle)
            self._drop(handle)

    def _drop(self, handle: Any) -> None:
        if handle in self.handles:
            self.handles.remove(handle)

    # The methods of vLLM's VLLMWeightSyncClient.

    def init_weight_transfer_engine(self, info: dict) -> None:
        calls = []
        for index, handle in enumerate(self.handles):
            own_info = dict(info)
            if "first_worker" in info:  # in the nccl group: the ranks, then engine by engine
                own_info["first_worker"] += index * self.settings.tensor_parallel
            calls.append((handle, handle.init_weight_transfer.remote(own_info)))
        self.collect(calls)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, info: dict) -> None:
        self.call("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self.group is not None and self.group.is_aborted:
            return  # not all weights were received
        self.group = None  # complete: an engine that dies from here on blocks no other
        self.call("finish_weight_update", self.version)
