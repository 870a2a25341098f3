"""X11: episodes in agent workers, on a real Ray; fake engines answer by the seed of the call."""

import asyncio
import os
import signal
import sys

import numpy as np
import pytest
import ray

from megastep import redaction
from megastep.config import EngineConfig, load
from megastep.rollout.data import Prompt
from megastep.rollout.engine import Progress
from megastep.rollout.fleet import Fleet
from megastep.rollout.generation import Generation
from megastep.rollout.task import Task
from megastep.rollout.worker import AgentWorker
from megastep.rollout.workers import Workers, default_workers
from megastep.types import StopReason
from tests.processes import wait_for

GIVEN = ["env.name=tests.rollout.worker_envs:Where", "rollout.samples_per_prompt=4"]
PROMPTS = [Prompt(n, {"n": n}) for n in range(6)]


class SeededEngine:
    """Five words that follow from the call's seed, after `delay_s`."""

    def __init__(self, index: int, delay_s: float):
        self.delay_s = delay_s
        self.answered = 0

    async def start(self) -> int:
        return os.getpid()

    async def check(self) -> Progress:
        return Progress()

    async def generate(self, prompt_ids, sampling, name, routing_start, routing_version):
        await asyncio.sleep(self.delay_s)
        self.answered += 1
        words = np.random.default_rng([sampling.seed, len(prompt_ids)]).integers(10, 40, 5)
        ids = np.append(words, sampling.stop_token_ids[0]).astype(np.int32)
        versions = np.array([[0, len(ids)]], np.int32)
        return Generation(ids, np.zeros(len(ids), np.float32), versions, "stop")


@pytest.fixture
def make(rollouts):
    """`make(workers, overrides, delay_s)`: a pool of agent workers, its Workers and its Fleet."""
    made = []

    def start(count: int, *given: str, delay_s: float = 0.0):
        config = load("configs/chase.yaml", [*GIVEN, *given])
        engine = ray.remote(SeededEngine).options(num_cpus=0, max_concurrency=1000)
        fleet = Fleet(lambda index: engine.remote(index, delay_s), EngineConfig(num_engines=2))
        made.append(fleet)
        fleet.start()
        fleet.open()
        local = Task.of_worker(config).pool(fleet.generate)
        if count == 0:
            return local, None, fleet
        actor = ray.remote(AgentWorker).options(num_cpus=0, max_concurrency=1000)
        environment = redaction.variables(config.env.options)
        workers = Workers(
            lambda index: actor.remote(config, index, os.getcwd(), sys.path, environment, None),
            count,
            fleet,
        )
        made.append(workers)
        workers.start()
        return workers.pool(local), workers, fleet

    yield start
    for thing in reversed(made):
        thing.close()


def steps(groups) -> list:
    return [
        [(s.prompt_ids.tolist(), s.response_ids.tolist(), s.reward) for s in t.steps]
        for group in groups
        for t in group.trajectories
    ]


def pids(groups) -> list[set[int]]:
    return [{t.env_metrics["pid"] for t in group.trajectories} for group in groups]


def test_x11_trajectories_do_not_depend_on_the_number_of_workers(make):
    found = []
    for count in (0, 1, 2):
        pool, _, _ = make(count)
        groups = asyncio.run(pool.run(PROMPTS))
        found.append(steps(groups))
        processes = set.union(*pids(groups))
        assert len(processes) == max(count, 1) and (os.getpid() in processes) == (count == 0)
        assert all(len(of_prompt) == 1 for of_prompt in pids(groups))  # one worker per prompt
    assert found[0] == found[1] == found[2] and len(found[0]) == 24


def test_an_agent_program_runs_in_the_workers(make):
    """As in the driver: the same tokens, its endpoint in the worker's process."""
    given = ("env.name=null", "agent=tests.rollout.agents:chase", "agent.reasoning_parser=none")
    row = {"table": list(range(16)), "hops": 2, "key": 7}
    prompts = [Prompt(n, row) for n in range(2)]
    found = []
    for count in (0, 1):
        pool, _, _ = make(count, *given)
        groups = asyncio.run(pool.run(prompts))
        assert all(t.stop_reason == "done" for g in groups for t in g.trajectories), groups
        found.append(steps(groups))
    assert found[0] == found[1] and len(found[0]) == 8


def test_x18_a_killed_worker_costs_its_running_episodes_only(make):
    pool, workers, _ = make(2, delay_s=0.5)
    expected = steps(asyncio.run(pool.run(PROMPTS)))
    killed = ray.get(workers.slots[1].handle.pid.remote())

    async def run():
        running = asyncio.ensure_future(pool.run(PROMPTS))
        await asyncio.sleep(0.7)
        os.kill(killed, signal.SIGKILL)
        return await running

    groups = asyncio.run(run())
    assert steps(groups) == expected
    assert killed not in set.union(*pids(groups)) and len(set.union(*pids(groups))) == 2
    assert workers.metrics() == {"worker/restarts": 1, "worker/env_calls_waiting": 0}


def test_x18_a_worker_killed_without_an_episode_does_not_end_the_run(make):
    pool, workers, _ = make(2)
    os.kill(ray.get(workers.slots[1].handle.pid.remote()), signal.SIGKILL)
    assert workers.metrics() == {"worker/restarts": 0, "worker/env_calls_waiting": 0}
    groups = asyncio.run(pool.run(PROMPTS))
    assert all(t.stop_reason == StopReason.DONE for g in groups for t in g.trajectories)
    assert workers.metrics()["worker/restarts"] == 1


def test_an_environment_that_ends_its_process_is_a_failed_trajectory(make):
    pool, workers, _ = make(2, "env.name=tests.rollout.worker_envs:Fatal")
    groups = asyncio.run(pool.run(PROMPTS[:4]))
    failed = groups[3].trajectories
    assert {t.stop_reason for t in failed} == {StopReason.ENV_ERROR}
    assert failed[0].env_metrics["error"] == "its agent worker failed 3 times: its process ended"
    assert all(t.stop_reason == StopReason.DONE for g in groups[:3:2] for t in g.trajectories)


def test_cancelling_an_episode_closes_its_environment_in_the_worker(make, tmp_path):
    pool, _, _ = make(
        1, "env.name=tests.rollout.worker_envs:Hanging", f"env.options.folder={tmp_path}"
    )

    async def run():
        episode = asyncio.ensure_future(pool.run_episode(PROMPTS[2], 0))
        while not (tmp_path / "stepping 2").exists():
            await asyncio.sleep(0.05)
        episode.cancel()
        await asyncio.wait([episode])
        assert episode.cancelled() and (tmp_path / "closed 2").exists()

    asyncio.run(run())


def test_calls_of_workers_move_to_another_engine(make):
    """A lost engine is killed by the fleet before its calls are repeated."""
    pool, _, fleet = make(2, delay_s=0.4)
    expected = steps(asyncio.run(pool.run(PROMPTS)))
    slot = fleet.slots[0]

    async def run():
        running = asyncio.ensure_future(pool.run(PROMPTS))
        await asyncio.sleep(0.6)
        os.kill(slot.pid, signal.SIGKILL)
        return await running

    assert steps(asyncio.run(run())) == expected
    wait_for(lambda: slot.restarts == 1 and slot.serving, 30)


def test_secrets_reach_workers_and_stay_hidden(make, monkeypatch, tmp_path):
    monkeypatch.setenv("LOOKUP_KEY", "a-long-secret-value")
    pool, _, _ = make(
        1,
        "env.name=tests.rollout.worker_envs:Hanging",
        f"env.options.folder={tmp_path}",
        "env.options.secret=${env:LOOKUP_KEY}",
    )
    trajectory = asyncio.run(pool.run_episode(PROMPTS[0], 0))
    assert trajectory.env_metrics["length"] == len("a-long-secret-value")
    assert "a-long-secret-value" not in str(trajectory.env_metrics)


@pytest.mark.parametrize(
    ("concurrency", "has_gpu", "spare_cpus", "workers"),
    [(256, False, 64, 0), (256, True, 64, 4), (256, True, 2.5, 2), (10, True, 0, 1)],
)
def test_default_number_of_workers(concurrency, has_gpu, spare_cpus, workers):
    assert default_workers(concurrency, has_gpu, spare_cpus) == workers
