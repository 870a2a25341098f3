"""Many episodes in flight over one `generate`: prompts → Groups.

At most `concurrency` episodes run at a time, prompt by prompt, so that the samples of a prompt start together and find
its prefix in the engine's cache. An episode that fails is a marked trajectory of its group: nothing is lost, no other
is disturbed. Seeds follow from the run's seed and the identity of the call, not from the order in which things happen.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megastep import redaction
from megastep.errors import RolloutFailed
from megastep.rollout.agent import Agent
from megastep.rollout.data import Prompt
from megastep.rollout.env import Env
from megastep.types import FAILED, Group, Trajectory


@dataclass
class Pool:
    agent: Agent
    env: type[Env]
    samples: int  # trajectories per prompt
    concurrency: int  # episodes at a time
    options: dict[str, Any] = field(default_factory=dict)  # of the environment
    label: str = "rollout"  # keeps the engine's sessions of different pools apart

    async def run(
        self,
        prompts: Iterable[Prompt],
        on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> list[Group]:
        """The groups in the order of the prompts; `on_trajectory` hears of each trajectory as it ends.

        Cancelling this cancels every episode and waits until each has closed its environment.
        """
        prompts = list(prompts)
        groups = [Group(prompt.id, [None] * self.samples) for prompt in prompts]
        waiting = ((p, g, index) for p, g in zip(prompts, groups) for index in range(self.samples))

        async def worker():
            for prompt, group, index in waiting:  # shared: each episode is taken by one worker
                group.trajectories[index] = trajectory = await self.play(prompt, index)
                on_trajectory(trajectory)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.concurrency, len(prompts) * self.samples)):
                tasks.create_task(worker())
        return groups

    async def play(self, prompt: Prompt, index: int) -> Trajectory:
        session = f"{self.label}/{prompt.id}/{index}"
        trajectory = await self.agent.play(
            lambda: self.env(prompt.row, **redaction.resolved(self.options)),
            prompt.id,
            index,
            session,
        )
        trajectory.env_metrics = redaction.hidden(trajectory.env_metrics)
        return trajectory


def check_not_all_failed(groups: list[Group]) -> None:
    """One failure is a number among the metrics; when nothing else happened there is nothing to go on with."""
    if all_failed(groups):
        trajectories = [t for group in groups for t in group.trajectories]
        first = trajectories[0]
        raise RolloutFailed(
            f"all {len(trajectories)} episodes failed; the first (group {first.group_id}, sample {first.index}) by "
            f"{first.stop_reason}: {first.env_metrics.get('error', 'no reason given')}"
        )


def all_failed(groups: list[Group]) -> bool:
    trajectories = [t for group in groups for t in group.trajectories]
    return bool(trajectories) and all(t.stop_reason in FAILED for t in trajectories)
