"""Many concurrent episodes over one `generate`: prompts → Groups.

At most `concurrency` episodes run at a time, prompt by prompt, so that the samples of a prompt
start together and find its prefix in the engine's cache. A failed episode is a marked trajectory of
its group and affects no other. Seeds follow from the run's seed and the identity of the call, not
from the order of events.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megastep import redaction
from megastep.errors import RolloutFailed
from megastep.rollout.agent import Agent
from megastep.rollout.data import Prompt
from megastep.rollout.env import Env
from megastep.rollout.generation import Session
from megastep.types import FAILED, Group, Trajectory


class Pool(ABC):
    """Episodes, wherever they run: here (LocalPool) or in agent workers (workers.RemotePool)."""

    samples_per_prompt: int
    concurrency: int  # episodes at a time
    label: str  # distinguishes the engine sessions of different pools

    @abstractmethod
    async def run_episode(self, prompt: Prompt, index: int) -> Trajectory:
        """Cancelling this cancels the episode and waits until it has closed its environment."""

    async def run(
        self,
        prompts: Iterable[Prompt],
        on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> list[Group]:
        """The groups in the order of the prompts; `on_trajectory` gets each trajectory as it ends.

        Cancelling this cancels every episode and waits until each has closed its environment.
        """
        prompts = list(prompts)
        indices = range(self.samples_per_prompt)
        pending = ((place, index) for place in range(len(prompts)) for index in indices)
        done: dict[tuple[int, int], Trajectory] = {}

        async def worker():
            for place, index in pending:  # shared: each episode is taken by one worker
                trajectory = await self.run_episode(prompts[place], index)
                done[place, index] = trajectory
                on_trajectory(trajectory)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.concurrency, len(prompts) * self.samples_per_prompt)):
                tasks.create_task(worker())
        return [
            Group(prompt.id, [done[place, index] for index in indices])
            for place, prompt in enumerate(prompts)
        ]


@dataclass
class LocalPool(Pool):
    agent: Agent
    env: type[Env]
    samples_per_prompt: int
    concurrency: int
    options: dict[str, Any] = field(default_factory=dict)  # of the environment
    label: str = "rollout"

    async def run_episode(self, prompt: Prompt, index: int) -> Trajectory:
        trajectory = await self.agent.run_episode(
            lambda: self.env(prompt.row, **redaction.resolved(self.options)),
            prompt.id,
            index,
            Session(f"{self.label}/{prompt.id}", index),
        )
        trajectory.env_metrics = redaction.hidden(trajectory.env_metrics)
        return trajectory


def check_not_all_failed(groups: list[Group]) -> None:
    """A single failure is a metric; a batch of failures ends the run."""
    if all_failed(groups):
        trajectories = [t for group in groups for t in group.trajectories]
        first = trajectories[0]
        raise RolloutFailed(
            f"all {len(trajectories)} episodes failed; the first (group {first.group_id}, "
            f"sample {first.index}) by {first.stop_reason}: "
            f"{first.env_metrics.get('error', 'no reason given')}"
        )


def all_failed(groups: list[Group]) -> bool:
    trajectories = [t for group in groups for t in group.trajectories]
    return bool(trajectories) and all(t.stop_reason in FAILED for t in trajectories)
