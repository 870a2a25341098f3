"""Many episodes over one engine: none lost, failures isolated, seeds independent of the order."""

import asyncio

import numpy as np
import pytest

from megastep.errors import RolloutFailed
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.data import Prompt
from megastep.rollout.env import Env, Outcome
from megastep.rollout.generation import Generation, Sampling
from megastep.rollout.pool import LocalPool, check_not_all_failed
from megastep.rollout.renderer import Renderer
from megastep.samples.filters import failed
from megastep.samples.metrics import rollout_metrics
from megastep.samples.validation import validate

from . import chats

RENDERER = Renderer(chats.tokenizer("qwen3"), "tokens")
LIMITS = Limits(max_turns=4, max_prompt_tokens=200, max_response_tokens=10, env_timeout_s=5.0)


class Count(Env):
    """The row sets the number of turns, or where to fail."""

    open = 0

    def __init__(self, row, *, reward=1.0):
        self.row = row
        self.reward = reward
        self.turn = 0
        if row.get("broken") == "made":
            raise ValueError("cannot be made")
        Count.open += 1

    async def start(self):
        return [{"role": "user", "content": "ab?" * self.row.get("long", 1)}]

    async def step(self, text, ids):
        self.turn += 1
        if self.row.get("broken") == "step":
            raise ValueError("cannot step")
        done = self.turn >= self.row.get("turns", 1)
        return Outcome([{"role": "user", "content": "on"}], reward=self.reward * done, done=done)

    async def close(self):
        Count.open -= 1


class Engine:
    """Samples tokens from the call's seed; counts concurrent calls."""

    def __init__(self, delay_s=0.001):
        self.delay_s = delay_s
        self.now = 0
        self.most = 0
        self.sessions = []
        self.seeds = []

    async def __call__(self, prompt_ids, sampling, *, session, **_):
        self.now += 1
        self.most = max(self.most, self.now)
        self.sessions.append(session)
        self.seeds.append(sampling.seed)
        try:
            await asyncio.sleep(self.delay_s * (1 + sampling.seed % 3))
        finally:
            self.now -= 1
        ids = np.random.default_rng(sampling.seed).integers(0, 200, 5).astype(np.int32)
        ids[-1] = RENDERER.end_id
        return Generation(ids, np.zeros(5, np.float32), np.array([[0, 5]], np.int32), "stop")


def pool(engine, samples_per_prompt=3, concurrency=4, seed=0, **more) -> LocalPool:
    agent = Agent(engine, RENDERER, LIMITS, Sampling(0), seed)
    return LocalPool(agent, Count, samples_per_prompt, concurrency, **more)


def prompts(*rows):
    return [Prompt(10 + i, row) for i, row in enumerate(rows)]


MIXED = prompts(
    {"turns": 3}, {"broken": "step"}, {"turns": 1}, {"broken": "made"}, {"long": 100}, {"turns": 9}
)


def test_s1_trajectories_of_different_lengths_and_stop_reasons_in_one_batch():
    engine = Engine()
    ended = []
    groups = asyncio.run(pool(engine).run(MIXED, ended.append))
    validate(groups)
    assert [g.id for g in groups] == [p.id for p in MIXED]
    assert all([t.index for t in g.trajectories] == [0, 1, 2] for g in groups)
    turns = [[len(t.steps) for t in g.trajectories] for g in groups]
    assert turns == [[3] * 3, [1] * 3, [1] * 3, [0] * 3, [0] * 3, [4] * 3]
    assert [g.trajectories[0].stop_reason for g in groups] == [
        "done",
        "env_error",
        "done",
        "env_error",
        "first_prompt",
        "max_turns",
    ]
    assert sorted(map(id, ended)) == sorted(id(t) for g in groups for t in g.trajectories)
    assert engine.most <= 4 and Count.open == 0


def test_s5_metrics_and_filters_of_that_batch_count_trajectories():
    groups = asyncio.run(pool(Engine()).run(MIXED))
    metrics = rollout_metrics(groups)
    assert metrics["rollout/trajectories"] == 18 and metrics["rollout/no_steps"] == 6
    assert metrics["reward/success"] == pytest.approx(1 / 3) and metrics[
        "reward/pass_at_2"
    ] == pytest.approx(1 / 3)
    assert metrics["rollout/turns_mean"] == pytest.approx((3 + 1 + 1 + 0 + 0 + 4) / 6)
    assert metrics["rollout/stop_env_error"] == pytest.approx(1 / 3)
    kept, dropped = failed(groups)
    assert [g.id for g in kept] == [10, 12, 14, 15]
    assert {d.reason.removeprefix("env_error: ValueError: ") for d in dropped} == {
        "cannot step",
        "cannot be made",
    }


def test_concurrent_calls_reach_the_limit():
    engine = Engine()
    asyncio.run(pool(engine, samples_per_prompt=8, concurrency=5).run(prompts({}, {})))
    assert engine.most == 5


def test_the_same_seed_gives_the_same_trajectories_in_any_order():
    def sampled(concurrency, seed=0, delay_s=0.001):
        made = pool(Engine(delay_s), concurrency=concurrency, seed=seed)
        groups = asyncio.run(made.run(prompts({"turns": 2}, {"turns": 3})))
        return [[s.response_ids.tolist() for s in t.steps] for g in groups for t in g.trajectories]

    assert sampled(1) == sampled(6) == sampled(3, delay_s=0.002) != sampled(1, seed=1)


def test_every_call_has_its_own_seed_and_every_trajectory_its_session():
    engine = Engine()
    asyncio.run(pool(engine, label="eval").run(prompts({"turns": 2}, {"turns": 2})))
    assert len(set(engine.seeds)) == 12
    assert set(engine.sessions) == {(f"eval/{g}", i) for g in (10, 11) for i in range(3)}


def test_options_reach_the_environment():
    groups = asyncio.run(pool(Engine(), options={"reward": 0.5}).run(prompts({})))
    assert groups[0].trajectories[0].reward == 0.5


def test_cancelling_closes_every_environment():
    engine = Engine(delay_s=30)

    async def run():
        episodes = pool(engine, samples_per_prompt=8, concurrency=6)
        task = asyncio.create_task(episodes.run(prompts({}, {})))
        while engine.now < 6:
            await asyncio.sleep(0.001)
        assert Count.open == 6
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
    assert Count.open == 0 and engine.now == 0


def test_a_batch_in_which_every_episode_failed_is_an_error():
    groups = asyncio.run(pool(Engine()).run(prompts({"broken": "step"}, {"broken": "made"})))
    with pytest.raises(RolloutFailed) as error:
        check_not_all_failed(groups)
    assert str(error.value) == (
        "all 6 episodes failed; the first (group 10, sample 0) by env_error: "
        "ValueError: cannot step"
    )
    check_not_all_failed(asyncio.run(pool(Engine()).run(prompts({"broken": "step"}, {}))))
    check_not_all_failed([])
