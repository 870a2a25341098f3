"""Many concurrent episodes over one `generate`: prompts → Groups.

At most `concurrency` episodes run at a time, prompt by prompt, so that the samples of a prompt
start together and find its prefix in the engine's cache. A failed episode is a marked trajectory of
its group and affects no other. Seeds follow from the run's seed and the identity of the call, not
from the order of events.
"""

import asyncio
import math
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
from megastep.samples.routing import drop_routing
from megastep.types import FAILED, Group, Trajectory


class Pool(ABC):
    """Episodes, wherever they run: here (LocalPool) or in agent workers (workers.RemotePool)."""

    samples_per_prompt: int
    concurrency: int  # episodes at a time
    label: str  # distinguishes the engine sessions of different pools
    keeps_routing: bool  # False: trajectories have none
    # Of the stored routing of outstanding groups; beyond it no prompt starts ahead of training.
    routing_limit_bytes: float = math.inf

    @abstractmethod
    async def run_episode(self, prompt: Prompt, index: int) -> Trajectory:
        """Cancelling this cancels the episode and waits until it has closed its environment."""

    async def close_group(self, prompt: Prompt, trajectories: list[Trajectory]) -> Group:
        """The group of a prompt whose episodes have all ended."""
        return Group(prompt.id, trajectories)

    def forget_group(self, prompt: Prompt) -> None:  # noqa: B027  # most pools have nothing to do
        """The group will not be closed."""

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
        groups: dict[int, Group] = {}

        async def worker():
            for place, index in pending:  # shared: each episode is taken by one worker
                trajectory = await self.run_episode(prompts[place], index)
                done[place, index] = trajectory
                on_trajectory(trajectory)
                if all((place, other) in done for other in indices):
                    trajectories = [done[place, other] for other in indices]
                    groups[place] = await self.close_group(prompts[place], trajectories)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.concurrency, len(prompts) * self.samples_per_prompt)):
                tasks.create_task(worker())
        return [groups[place] for place in range(len(prompts))]


@dataclass
class LocalPool(Pool):
    agent: Agent
    env: type[Env]
    samples_per_prompt: int
    concurrency: int
    options: dict[str, Any] = field(default_factory=dict)  # of the environment
    label: str = "rollout"
    keeps_routing: bool = True

    async def run_episode(self, prompt: Prompt, index: int) -> Trajectory:
        trajectory = await self.agent.run_episode(
            lambda: self.env(prompt.row, **redaction.resolved(self.options)),
            prompt.id,
            index,
            Session(f"{self.label}/{prompt.id}", index),
        )
        trajectory.env_metrics = redaction.hidden(trajectory.env_metrics)
        return trajectory if self.keeps_routing else drop_routing(trajectory)


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
