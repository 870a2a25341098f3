"""X8: the real loop in simulated time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megastep.config import Config, load
from megastep.errors import ConfigError
from megastep.plan.planning import Plan, make_plan
from megastep.rollout.router import Router
from megastep.samples import lay_out, make_samples
from megastep.samples.staleness import StalenessTracker
from megastep.simulate.cluster import SimulatedTrajectory
from megastep.simulate.episodes import Distributions, Episode, Turn
from megastep.simulate.roofline import Iteration
from megastep.simulate.simulation import Result, SimulatedLearner, simulate
from megastep.types import Group, Step

UPDATE, SYNC, PAUSE, STEP = 100.0, 7.0, 1.0, 3.0
TOKEN = 0.01
RESPONSE = 50


class ConstantTimes:
    """A rollout of one turn takes RESPONSE × TOKEN seconds, whatever the batch."""

    call_s = 0.0

    def __init__(self, update: float = UPDATE):
        self.update_s = update

    def iteration(self, sequences):
        return Iteration(TOKEN, 0.0, 0.0, 0.0, 0.0)

    def prefill(self, new_tokens, cached_tokens):
        return 0.0

    def update(self, rounds, forward_passes):
        return self.update_s

    def step(self):
        return STEP

    def sync(self):
        return SYNC

    def switch(self, what):
        return PAUSE if what == "pause" else 0.0


class OneTurn:
    """Some prompts have a slow environment."""

    def __init__(self, env_s: float = 0.0, slow_s: float = 0.0, slow_every: int = 10**9):
        self.env_s = env_s
        self.slow_s = slow_s
        self.slow_every = slow_every

    def episode(self, prompt, index):
        is_slow = prompt % self.slow_every == self.slow_every - 1
        env_s = self.slow_s if is_slow else self.env_s
        return Episode([Turn(0, 10, RESPONSE, env_s)], reward=float(index % 2))

    def describe(self):
        return "one turn"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load("configs/chase.yaml"))


def config(*overrides: str) -> Config:
    return load(
        "configs/chase.yaml",
        [
            "rollout.prompts=4",
            "rollout.samples_per_prompt=2",
            "train.mini_batch_prompts=4",
            *overrides,
        ],
    )


def steps_of(result: Result) -> list[float]:
    return [row.metrics["time/step_s"] for row in result.counted]


def test_a_synchronous_step_is_the_sum_of_its_parts(plan):
    result = simulate(config(), plan, ConstantTimes(), OneTurn(env_s=2.0), steps=3)
    rollout = RESPONSE * TOKEN + 2.0
    assert steps_of(result) == pytest.approx([rollout + UPDATE + PAUSE + SYNC] * 3)
    assert result.step_s == pytest.approx(rollout + UPDATE + PAUSE + SYNC + STEP)
    assert result.ranks_idle == pytest.approx((rollout + STEP) / result.step_s)
    assert result.mean("staleness/max") == 0
    assert result.binds() == "update"


def test_each_mini_batch_is_an_update(plan):
    two = config("train.mini_batch_prompts=2")
    result = simulate(two, plan, ConstantTimes(), OneTurn(), steps=2)
    assert result.mean("time/update_s") == pytest.approx(2 * UPDATE)
    assert result.mean("rollout/version") == pytest.approx((2 + 4) / 2)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ((), 0),  # one mini-batch: the update itself computes the old logprobs
        (("train.mini_batch_prompts=2",), 1),
        (("train.mini_batch_prompts=2", "loss.old_logprobs=rollout"), 0),
        (("loss.kl_coef=0.1",), 1),
    ],
)
def test_passes_without_backward_are_those_of_the_policy(plan, overrides, expected):
    """As in PolicyWorker.learn."""
    asked = []

    class Times(ConstantTimes):
        def update(self, rounds, forward_passes):
            asked.append(forward_passes)
            return UPDATE

    simulate(config(*overrides), plan, Times(), OneTurn(), steps=1)
    assert set(asked) == {expected}


def test_colocated_engines_sleep_once_per_step(plan):
    """And wake twice: for the weights, then for the KV cache."""
    switched: list[str] = []

    class Times(ConstantTimes):
        def switch(self, what):
            switched.append(what)
            return 0.0

    shared = config("cluster.colocate=true")
    simulate(shared, plan, Times(), OneTurn(), steps=2)
    first = ["offload", "pause", "sleep", "wake", "wake"]
    step = ["sleep", "onload", "offload", "pause", "wake", "wake"]
    assert switched == [*first, *step, *step]


def test_routing_in_the_object_store_is_layers_times_top_k(plan):
    """Synchronous: 8 trajectories of 60 tokens, and no group that waits."""
    experts = plan.arch.experts
    result = simulate(config(), plan, ConstantTimes(), OneTurn(), steps=2)
    assert result.store_bytes == 8 * 60 * sum(experts.layers) * experts.top_k
    off = config("routing_replay.enabled=false")
    assert simulate(off, plan, ConstantTimes(), OneTurn(), steps=2).store_bytes == 0


def test_asynchronous_training_hides_the_rollout(plan):
    ahead = config("async.max_staleness=1")
    result = simulate(ahead, plan, ConstantTimes(), OneTurn(env_s=50.0), steps=4)
    assert result.step_s == pytest.approx(UPDATE + PAUSE + SYNC + STEP)
    assert result.mean("time/rollout_s") == 0
    assert result.ranks_idle == pytest.approx(STEP / result.step_s)


def test_concurrency_is_that_of_the_stream(plan):
    """8 episodes, 2 at a time."""
    few = config("rollout.concurrency=2")
    result = simulate(few, plan, ConstantTimes(), OneTurn(env_s=2.0), steps=2)
    assert result.mean("time/rollout_s") == pytest.approx(4 * (2.0 + RESPONSE * TOKEN))


@pytest.mark.parametrize("staleness", [1, 2, 3.5])
def test_staleness_is_that_of_the_real_tracker(plan, staleness, monkeypatch):
    """Its limit holds, and the result has what the tracker counted."""
    counted = []
    original = StalenessTracker.metrics

    def metrics(self, groups, limit):
        counted.append(original(self, groups, limit))
        return counted[-1]

    monkeypatch.setattr(StalenessTracker, "metrics", metrics)
    ahead = config(f"async.max_staleness={staleness}")
    result = simulate(ahead, plan, ConstantTimes(update=5.0), OneTurn(env_s=60.0), steps=6)
    of_counted = counted[result.first : result.last]
    assert [row.metrics["staleness/mean"] for row in result.counted] == [
        of_step["staleness/mean"] for of_step in of_counted
    ]
    assert 0 < max(of_step["staleness/max"] for of_step in of_counted) <= np.ceil(staleness)


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_on_stale_decides_about_slow_groups(plan, on_stale):
    """Every 8th prompt takes as long as twenty training steps."""
    ahead = config("async.max_staleness=2", f"async.on_stale={on_stale}")
    slow = OneTurn(env_s=1.0, slow_s=20 * UPDATE, slow_every=8)
    result = simulate(ahead, plan, ConstantTimes(), slow, steps=12)
    assert (result.mean("async/waited") > 0) == (on_stale == "wait")
    assert (result.mean("async/dropped") > 0) == (on_stale == "drop")
    if on_stale == "drop":
        assert result.step_s < 2 * UPDATE
    else:
        assert result.step_s > 2 * UPDATE


def test_calls_go_through_the_real_router(plan, monkeypatch):
    """Samples of a prompt share an engine, so that its prompt is prefilled once."""
    two = config("engine.num_engines=2")
    shared = simulate(two, plan, ConstantTimes(), OneTurn(), steps=2)
    assert shared.cache_hits > 0.4
    monkeypatch.setattr(Router, "_engine_for_group", scattered())
    spread = simulate(two, plan, ConstantTimes(), OneTurn(), steps=2)
    assert spread.cache_hits == 0


def scattered():
    calls = iter(range(10**6))

    def choose(self, group):
        engines = list(self._engines.serving)
        return engines[next(calls) % len(engines)]

    return choose


def test_a_call_over_its_time_limit_fails_its_trajectory(plan):
    short = config("engine.request_timeout_s=1")

    class Long(OneTurn):
        def episode(self, prompt, index):
            return Episode([Turn(0, 10, 500 if index else RESPONSE, 0.0)], 1.0)

    result = simulate(short, plan, ConstantTimes(), Long(), steps=1)
    assert result.mean("rollout/stop_engine_error") == 0.5


def test_a_simulation_depends_on_its_seed_alone(plan):
    def rows(seed: int):
        drawn = config("async.max_staleness=1", f"train.seed={seed}", "engine.num_engines=2")
        episodes = Distributions.of(drawn, {"env-seconds": "1~5"})
        result = simulate(drawn, plan, ConstantTimes(), episodes, steps=4)
        return [(row.ended_s, row.tokens, row.busy, row.metrics) for row in result.rows]

    assert rows(0) == rows(0)
    assert rows(0) != rows(1)


# ---------------------------------------------------------------- packing


def real_group(group: Group) -> Group:
    """The same lengths, with tokens: fresh ones wherever nothing is shared."""
    fresh = iter(range(10**6))

    def some(count: int) -> np.ndarray:
        return np.array([next(fresh) for _ in range(count)], np.int32)

    first_prompt = some(group.trajectories[0].turns[0].new_tokens)
    trajectories = []
    for trajectory in group.trajectories:
        steps = []
        before = np.empty(0, np.int32)
        for number, turn in enumerate(trajectory.turns):
            new = first_prompt if number == 0 else some(turn.new_tokens)
            prompt = np.concatenate([before[: turn.shared_tokens], new])
            response = some(turn.response_tokens)
            steps.append(
                Step(
                    number,
                    number == len(trajectory.turns) - 1,
                    prompt,
                    response,
                    np.ones(len(response), bool),
                    np.zeros(len(response), np.float32),
                    np.array([[0, len(response)]], np.int32),
                )
            )
            before = np.concatenate([prompt, response])
        steps[-1].reward = float(trajectory.index)
        trajectories.append(replace(trajectory, steps=steps))
    return Group(group.id, trajectories)


@pytest.mark.parametrize("layout", ["trie", "merge", "flat"])
@pytest.mark.parametrize("budget", [200, 1000])
def test_micro_batches_are_those_of_real_packing(plan, layout, budget):
    """By lengths alone: the tokens of every micro-batch of every rank are the same."""
    packed = config(
        f"train.micro_batch_tokens={budget}",
        f"train.pack_layout={layout}",
        "policy.ranks=2",
        "rollout.max_response_tokens=30",
        "rollout.max_prompt_tokens=150",
    )
    drawn = Distributions.of(
        packed,
        {
            "turns": "1..4",
            "prompt-tokens": "40",
            "response-tokens": "5..25",
            "observation-tokens": "3..9",
        },
    )
    groups = [
        Group(
            id,
            [
                SimulatedTrajectory(id, index, [], turns=drawn.episode(id, index).turns)
                for index in range(6)
            ],
        )
        for id in range(5)
    ]
    learner = SimulatedLearner(packed, plan, ConstantTimes(), None)
    simulated = learner.pack(groups)
    samples = make_samples([real_group(group) for group in groups], "grpo", "token", 1.0, 1.0)
    real, _ = lay_out(samples, 2, budget, 1, layout, attention_tokens=6 * plan.arch.hidden)
    assert [[size.tokens for size in of_round] for of_round in simulated] == [
        [micro_batch.real_tokens for micro_batch in of_round] for of_round in zip(*real)
    ]


def test_a_call_longer_than_a_micro_batch_is_an_error(plan):
    with pytest.raises(ConfigError, match="raise train.micro_batch_tokens"):
        simulate(config("train.micro_batch_tokens=129"), plan, ConstantTimes(), Longer(), steps=1)


class Longer(OneTurn):
    def episode(self, prompt, index):
        return Episode([Turn(0, 120, 40, 0.0)], float(index))


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("path", sorted(Path("configs/h100").glob("qwen3-8b*.yaml")), ids=str)
def test_recipes_can_be_simulated(path):
    from megastep.simulate.hardware import Hardware
    from megastep.simulate.roofline import Roofline

    recipe = load(path, has_cuda=True)
    its_plan = make_plan(recipe)
    times = Roofline(recipe, its_plan, Hardware())
    result = simulate(recipe, its_plan, times, Distributions.of(recipe, {}), steps=1)
    assert 100 < result.tokens_per_gpu_s < 20_000
    assert result.gpus == 8
