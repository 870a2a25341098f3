"""The cluster in simulated time: `Cluster.sync` and `Cluster.to_policy` are the real ones."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megastep.cluster import Cluster
from megastep.config import Config
from megastep.errors import EngineError
from megastep.plan.planning import GPUS_PER_NODE, Plan
from megastep.rollout.generation import Generation, Session
from megastep.rollout.pool import Pool
from megastep.rollout.router import EngineId, Engines, Router
from megastep.rollout.workers import default_workers
from megastep.simulate.clock import SimulatedStream
from megastep.simulate.engine import SimulatedEngine, SimulatedSampling, zeros
from megastep.simulate.episodes import Episodes, Turn
from megastep.simulate.roofline import Times
from megastep.types import Step, StopReason, Trajectory

CPUS_PER_NODE = 96


class SimulatedCluster(Cluster):
    """`stream` is set before the first weight sync."""

    stream: SimulatedStream

    def __init__(self, config: Config, plan: Plan, times: Times):
        super().__init__(config)
        self.times = times
        self.fleet = SimulatedFleet(self, plan)
        self.ranks = SimulatedPolicy(self)
        self._engines = self.fleet  # type: ignore[assignment]
        self._policy = self.ranks  # type: ignore[assignment]

    @property
    def has_gpu(self) -> bool:
        return True

    def routers(self) -> list[Router]:
        """One per agent worker; the driver's if there are none."""
        config = self.config
        gpus = config.policy.ranks
        if not config.cluster.colocate:
            gpus += config.engine.num_engines * config.engine.tensor_parallel
        cpus = -(-gpus // GPUS_PER_NODE) * CPUS_PER_NODE
        spare = cpus - sum(bundle["CPU"] for bundle in self._bundles())
        count = config.rollout.workers
        if count is None:
            count = default_workers(config.rollout.concurrency, True, spare)
        engines = {EngineId(slot, 1): e for slot, e in enumerate(self.fleet.engines)}
        routers = [
            Router(config.engine, _never_lost, first=index, cancel=_cancel)
            for index in range(max(count, 1))
        ]
        for router in routers:
            router.update(Engines(engines))
        return routers


def _never_lost(lost: Any) -> None:
    raise AssertionError(f"simulated engines do not die: {lost}")


def _cancel(answer: Any) -> None:
    answer.cancel()


class SimulatedFleet:
    """All engines; the methods that the driver calls take their time."""

    def __init__(self, cluster: SimulatedCluster, plan: Plan):
        settings = cluster.config.engine
        self._cluster = cluster
        self._asleep = False
        self.engines = [
            SimulatedEngine(cluster.times, settings.max_sequences, plan.engine.kv_tokens)
            for _ in range(settings.num_engines)
        ]

    async def generate(self, *_, **__) -> Any:
        raise AssertionError("the routers of a SimulatedPool call the engines")

    def ready(self) -> list[SimulatedEngine]:
        return self.engines

    def serve(self, handles: list[SimulatedEngine]) -> None:
        pass

    def pause(self, finish_calls: bool = False) -> None:
        async def pause() -> None:
            for engine in self.engines:
                await engine.pause(finish_calls)

        self._cluster.stream.submit(pause()).result()
        self._take("pause")

    def resume(self) -> None:
        async def resume() -> None:
            for engine in self.engines:
                engine.resume()

        self._cluster.stream.submit(resume()).result()

    def sleep(self) -> None:
        if not self._asleep:
            self._take("sleep")
        self._asleep = True

    def wake(self, what: str) -> None:
        self._take("wake")
        self._asleep = False

    def metrics(self) -> dict[str, float]:
        return {}

    def _take(self, what: str) -> None:
        self._cluster.stream.wait(self._cluster.times.switch(what))


@dataclass
class SimulatedPolicy:
    """All ranks."""

    cluster: SimulatedCluster
    version: int = 0  # optimizer steps

    def onload(self) -> None:
        self.cluster.stream.wait(self.cluster.times.switch("onload"))

    def offload(self) -> None:
        self.cluster.stream.wait(self.cluster.times.switch("offload"))

    def sync_weights(self, engines: list[SimulatedEngine]) -> int:
        async def update() -> None:
            for engine in engines:
                engine.update_weights(self.version)

        self.cluster.stream.wait(self.cluster.times.sync())
        self.cluster.stream.submit(update()).result()
        return self.version

    def seal_written(self) -> None:
        pass


@dataclass(eq=False)
class SimulatedTrajectory(Trajectory):
    turns: list[Turn] = field(default_factory=list)


@dataclass
class SimulatedPool(Pool):
    samples_per_prompt: int
    concurrency: int
    routers: list[Router]
    episodes: Episodes
    label: str = "train"

    async def run_episode(self, prompt: Any, index: int) -> SimulatedTrajectory:
        episode = self.episodes.episode(prompt.id, index)
        router = self.routers[prompt.id % len(self.routers)]
        session = Session(f"{self.label}/{prompt.id}", index)
        steps: list[Step] = []
        stop = StopReason.DONE
        for number, turn in enumerate(episode.turns):
            sampling = SimulatedSampling(
                max_tokens=turn.response_tokens,
                response_tokens=turn.response_tokens,
                shared_tokens=turn.shared_tokens,
                session=session,
                first_prompt_tokens=episode.turns[0].new_tokens,
            )
            prompt_ids = zeros(turn.prompt_tokens)
            try:
                generation = await router.generate(prompt_ids, sampling, session=session)
            except EngineError:  # over engine.request_timeout_s, as in rollout/agent.py
                stop = StopReason.ENGINE_ERROR
                break
            steps.append(_step(number, prompt_ids, generation))
            await asyncio.sleep(turn.env_s)
        if steps:
            steps[-1].last = True
            steps[-1].reward = episode.reward
        turns = episode.turns[: len(steps)]
        return SimulatedTrajectory(prompt.id, index, steps, stop, turns=turns)


def _step(number: int, prompt_ids: np.ndarray, generation: Generation) -> Step:
    return Step(
        index=number,
        last=False,
        prompt_ids=prompt_ids,
        response_ids=generation.ids,
        loss_mask=np.broadcast_to(np.True_, generation.ids.shape),
        logprobs=None,
        versions=generation.versions,
    )
