"""X11: episodes in agent workers, on a real Ray; fake engines answer by the seed of the call."""

import asyncio
import os
import signal
import sys
from functools import partial

import numpy as np
import pytest
import ray
from ray._private.serialization import SerializationContext

from megastep import redaction
from megastep.config import EngineConfig, load
from megastep.distributed.references import get_routing
from megastep.errors import RolloutError, RoutingLost
from megastep.rollout.data import Prompt
from megastep.rollout.engine import Progress
from megastep.rollout.fleet import Fleet
from megastep.rollout.generation import Generation
from megastep.rollout.keeper import spawn_keeper, write_rollouts
from megastep.rollout.task import Task
from megastep.rollout.worker import AgentWorker
from megastep.rollout.workers import Workers, default_workers
from megastep.samples import lay_out, store
from megastep.samples.routing import routing_of_groups, tables_of
from megastep.samples.trie import fold
from megastep.samples.validation import model_limits, validate
from megastep.types import StopReason, StoredRouting
from tests.processes import wait_for
from tests.samples.rollouts import samples_of

GIVEN = ["env.name=tests.rollout.worker_envs:Where", "rollout.samples_per_prompt=4"]
PROMPTS = [Prompt(n, {"n": n}) for n in range(6)]


LAYERS, TOP_K = 2, 2  # of the model of configs/chase.yaml


class SeededEngine:
    """Five words that follow from the call's seed, after `delay_s`; `routing` gives the routing of
    tokens from a position on."""

    def __init__(self, index: int, delay_s: float, routing):
        self.delay_s = delay_s
        self.routing = routing
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
        generation = Generation(ids, np.zeros(len(ids), np.float32), versions, "stop")
        if self.routing is not None:
            tokens = np.append(prompt_ids, ids)[routing_start:-1]
            generation.routing = self.routing(tokens, routing_start)
            generation.routing_start = routing_start
        return generation


def hashed_routing(tokens: np.ndarray, start: int) -> np.ndarray:
    """[n, L, K]: distinct experts of 8 that follow from token and position."""
    hashed = tokens * 7 + np.arange(start, start + len(tokens))
    first = (hashed[:, None] + np.arange(LAYERS)) % 8
    return np.stack([first, (first + 3) % 8], axis=-1).astype(np.uint8)


# A row of routing. Between the buffers of an object are up to 63 bytes that others have used.
MARK = bytes(range(100, 164))


def marked_routing(tokens: np.ndarray, start: int) -> np.ndarray:
    row = np.frombuffer(MARK, np.uint8).reshape(LAYERS, -1)
    return np.tile(row, (len(tokens), 1, 1))


@pytest.fixture
def make(rollouts):
    """`make(workers, overrides, delay_s)`: a pool of agent workers, its Workers and its Fleet."""
    made = []

    def start(count: int, *given: str, delay_s: float = 0.0, routing=None):
        config = load("configs/chase.yaml", [*GIVEN, *given])
        engine = ray.remote(SeededEngine).options(num_cpus=0, max_concurrency=1000)
        fleet = Fleet(
            lambda index: engine.remote(index, delay_s, routing), EngineConfig(num_engines=2)
        )
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
            None if routing is None else partial(spawn_keeper, config),
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


# ---------------------------------------------------------------- routing by reference


def recorded(groups) -> list:
    return [
        [(s.routing_start, s.routing.tolist()) for s in t.steps]
        for group in groups
        for t in group.trajectories
    ]


def test_x11_routing_by_reference_is_what_the_driver_would_have_recorded(make, tmp_path):
    """Read back from a rollout file, which one task writes: the driver has no values."""
    local, _, _ = make(0, routing=hashed_routing)
    wanted = asyncio.run(local.run(PROMPTS))
    pool, _, _ = make(2, routing=hashed_routing)
    groups = asyncio.run(pool.run(PROMPTS))
    routing = routing_of_groups(groups)
    assert len(routing) == 48 and all(type(r) is StoredRouting for r in routing)
    tables = tables_of(routing)
    assert len(tables) == 6 and all(not table.arrays for table in tables)
    # The prompt of 4 samples is stored once.
    rows = sum(len(r) for r in routing)
    stored = sum(int(table.bounds[-1]) for table in tables)
    assert stored < rows and steps(groups) == steps(wanted)
    write_rollouts(tmp_path / "file", groups)
    assert recorded(store.read(tmp_path / "file")) == recorded(wanted)
    assert fold(samples_of(*groups))[1] == fold(samples_of(*wanted))[1]


@pytest.fixture
def driver_bytes(monkeypatch):
    """What this process serializes and deserializes for Ray."""
    passed: list[bytes] = []
    serialize = SerializationContext.serialize
    deserialize = SerializationContext.deserialize_objects

    def counted_serialize(self, value):
        made = serialize(self, value)
        passed.append(value if isinstance(value, bytes) else made.to_bytes())
        return made

    def counted_deserialize(self, objects, *more):
        passed.extend(bytes(found.data) for found in objects if found.data is not None)
        return deserialize(self, objects, *more)

    monkeypatch.setattr(SerializationContext, "serialize", counted_serialize)
    monkeypatch.setattr(SerializationContext, "deserialize_objects", counted_deserialize)
    return passed


def test_x11_no_byte_of_routing_passes_through_the_driver(make, driver_bytes, tmp_path):
    """From the episodes to the ranks' micro-batches and to a rollout file."""
    rows = {}
    for count in (0, 2):
        pool, _, _ = make(count, routing=marked_routing)
        driver_bytes.clear()
        groups = asyncio.run(pool.run(PROMPTS))
        [batches], _ = lay_out(samples_of(*groups), 1, 4096)
        ray.put(batches)
        write_rollouts(tmp_path / "file", groups)
        rows[count] = sum(passed.count(MARK) for passed in driver_bytes)
    assert rows[0] > 500 and rows[2] == 0
    written = store.read(tmp_path / "file")
    assert {step.routing.tobytes() for g in written for step in steps_of(g)} == {
        len(step.routing) * MARK for g in groups for step in steps_of(g)
    }


def steps_of(group) -> list:
    return [step for trajectory in group.trajectories for step in trajectory.steps]


def test_x18_routing_outlives_its_worker_and_runs_again_when_its_keeper_dies(make, tmp_path):
    pool, workers, _ = make(1, routing=hashed_routing)

    async def run() -> list:
        first = [await pool.run_episode(PROMPTS[0], index) for index in range(4)]
        second = [await pool.run_episode(PROMPTS[1], index) for index in range(4)]
        before = ray.get(workers.slots[0].handle.pid.remote())
        os.kill(before, signal.SIGKILL)
        groups = [await pool.close_group(PROMPTS[0], first)]
        assert workers.slots[0].restarts == 0  # no episode ran for it
        keeper = workers.slots[0].keeper
        assert groups[0].trajectories[0].env_metrics["pid"] == before
        os.kill(ray.get(keeper.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
        groups.append(await pool.close_group(PROMPTS[1], second))
        assert groups[1].trajectories[0].env_metrics["pid"] != before
        return groups

    groups = asyncio.run(run())
    (table,) = tables_of(routing_of_groups(groups[:1]))
    with pytest.raises(RoutingLost, match="recorded routing is lost"):
        get_routing([table.references[0]])
    with pytest.raises(RoutingLost, match="the process that kept it, ended"):
        write_rollouts(tmp_path / "file", groups)
    write_rollouts(tmp_path / "file", groups[1:])
    local, _, _ = make(0, routing=hashed_routing)
    wanted = asyncio.run(local.run(PROMPTS[1:2]))
    assert recorded(store.read(tmp_path / "file")) == recorded(wanted)


def test_s10_invalid_routing_is_found_by_the_keeper_and_reported_by_the_driver(make):
    """Of trained steps only: a filter may drop the others."""
    pool, workers, _ = make(1, routing=hashed_routing)
    trajectory = asyncio.run(pool.run_episode(PROMPTS[0], 0))
    keeper = workers.slots[0].keeper

    def spoil(self) -> None:
        (trajectory,) = self._trajectories["train", 0].values()
        trajectory.steps[1].routing = trajectory.steps[1].routing.copy()
        trajectory.steps[1].routing[2, 1] = 5

    ray.get(keeper.__ray_call__.remote(spoil))
    group = asyncio.run(pool.close_group(PROMPTS[0], [trajectory]))
    _, experts = model_limits(load("configs/chase.yaml", GIVEN))
    with pytest.raises(RolloutError, match="trajectory 0, step 1: token .* has one expert twice"):
        validate([group], experts=experts)
    untrained = np.zeros_like(trajectory.steps[1].loss_mask)
    trajectory.steps[1].loss_mask = untrained
    validate([group], experts=experts)


def test_a_group_that_cannot_be_closed_is_an_error(make):
    pool, workers, _ = make(1, routing=hashed_routing)
    trajectory = asyncio.run(pool.run_episode(PROMPTS[0], 0))
    keeper = workers.slots[0].keeper

    def spoil(self) -> None:
        (trajectory,) = self._trajectories["train", 0].values()
        trajectory.steps[1].routing = trajectory.steps[1].routing[:3]

    ray.get(keeper.__ray_call__.remote(spoil))
    with pytest.raises(RolloutError, match="step 1: routing ends before token"):
        asyncio.run(pool.close_group(PROMPTS[0], [trajectory]))
