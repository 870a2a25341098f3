"""An agent worker: a Ray actor that runs episodes, with its own event loop, tokenizer, environments
and router. `workers.py` is the driver's side. Recorded routing goes to a keeper (`keeper.py`).
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import ray

from megastep.config import Config
from megastep.distributed.processes import send_output_to
from megastep.rollout import blocking
from megastep.rollout.data import Prompt
from megastep.rollout.pool import Pool
from megastep.rollout.router import Engines, Lost, Router
from megastep.rollout.task import Task
from megastep.samples.routing import drop_routing
from megastep.types import Trajectory

EpisodeKey = tuple[str, int, int]  # label of the pool, prompt, index


class AgentWorker:
    """An async actor: all methods run in one event loop."""

    def __init__(
        self,
        config: Config,
        index: int,
        folder: str,
        modules: list[str],
        environment: dict[str, str],
        log: str | None,
    ):
        """modules: the driver's import path; environment: variables that env.options name."""
        os.chdir(folder)
        os.environ.update(environment)
        sys.path.extend(path for path in modules if path not in sys.path)
        if log:
            send_output_to(Path(log))
        self.router = Router(config.engine, self._report, first=index)
        self.lost: list[Lost] = []
        self.has_lost = asyncio.Event()
        task = Task.of_worker(config)
        pools = task.pool(self.router.generate), task.eval_pool(self.router.generate)
        self.pools: dict[str, Pool] = {pool.label: pool for pool in pools}
        self.episodes: dict[EpisodeKey, asyncio.Task] = {}
        self.keeper: Any = None  # a Ray actor; None: the model has no experts

    async def pid(self) -> int:
        return os.getpid()

    async def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    async def run_episode(self, label: str, prompt: Prompt, index: int) -> Trajectory:
        """Without routing, which the keeper gets first."""
        key = (label, prompt.id, index)
        pool = self.pools[label]
        self.episodes[key] = asyncio.ensure_future(pool.run_episode(prompt, index))
        try:
            trajectory = await self.episodes[key]
        finally:
            del self.episodes[key]
        if self.keeper is None or not pool.keeps_routing:
            return trajectory
        await self.keeper.add.remote((label, prompt.id), trajectory)
        return drop_routing(trajectory)

    async def cancel_episode(self, key: EpisodeKey) -> None:
        """Returns when the environment is closed."""
        episode = self.episodes.get(key)
        if episode is not None:
            episode.cancel()
            await asyncio.wait([episode])

    # ------------------------------------------------------------ the fleet

    async def set_engines(self, engines: Engines) -> None:
        self.router.update(engines)

    async def set_keeper(self, keeper: Any) -> None:
        self.keeper = keeper

    def _report(self, lost: Lost) -> None:
        self.lost.append(lost)
        self.has_lost.set()

    async def lost_engines(self) -> list[Lost]:
        """Reports of the router; waits for one."""
        await self.has_lost.wait()
        self.has_lost.clear()
        lost = self.lost
        self.lost = []
        return lost

    async def peak_waiting(self) -> int:
        """See `blocking.BlockingCalls`."""
        return blocking.calls.peak_waiting()
