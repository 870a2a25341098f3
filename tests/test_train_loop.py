"""The loop itself, on episodes and a policy that are made up: what it asks of its parts, and in which order."""

from types import SimpleNamespace

import pytest

from megastep.config import load
from megastep.policy.loop_state import LoopState
from megastep.rollout import stream
from megastep.rollout.data import PromptStream
from megastep.rundir import Run
from megastep.train import Loop
from tests.rollout.test_stream import Episodes
from tests.runs import LOCAL

GIVEN = ("rollout.prompts=4", "train.mini_batch_prompts=4", "train.steps=9", "run.rollouts_every=0")


class Versioned(Episodes):
    """Every token of an episode was sampled by policy `version`."""

    version = 0

    async def play(self, prompt, index):
        trajectory = await super().play(prompt, index)
        trajectory.steps[0].versions[:, 0] = self.version
        trajectory.steps[0].reward = float(index)
        return trajectory


class CutOff(Versioned):
    """Every trajectory of an even prompt is cut off."""

    async def play(self, prompt, index):
        trajectory = await super().play(prompt, index)
        trajectory.steps[0].finish = "stop" if prompt.id % 2 else "length"
        return trajectory


class Policy(SimpleNamespace):
    def call(self, method: str, *_) -> None:
        self.calls.append(method)


def make_loop(tmp_path, episodes: Episodes, *given: str, state=LoopState(0)) -> Loop:
    prompts = PromptStream([{"n": n} for n in range(50)], seed=0)
    task = SimpleNamespace(pool=lambda _: episodes, stream=lambda: prompts, eval_prompts=lambda: ["held out"],
                           eval_pool=lambda _: SimpleNamespace(run=held_out))
    cluster = SimpleNamespace(engines=SimpleNamespace(generate=None), policy=Policy(calls=[]), sync=lambda: 7,
                              to_policy=lambda: None)
    loop = Loop(load(LOCAL, [*GIVEN, *given]), task, cluster, Run(tmp_path, None, state), log=None)
    episodes.stream = loop.stream
    return loop


async def held_out(prompts: list) -> list:
    return prompts


@pytest.mark.parametrize("version, kept", [(3, 0), (5, 4), (6, 4)])
def test_s15_what_is_too_old_is_not_trained_on_whatever_the_schedule_was(version, kept, tmp_path):
    """The loop looks at the tokens' own versions."""
    episodes = Versioned()
    episodes.version = version
    loop = make_loop(tmp_path, episodes, "async.max_staleness=1")
    loop.ages.pushed, loop.step = [3, 5, 6], 1
    with loop.stream:
        groups, metrics = loop.collect()
    assert len(groups) == kept and metrics["rollout/trajectories"] == 4 * episodes.samples
    assert metrics["filter/dropped"] == (4 - kept) * episodes.samples


@pytest.mark.parametrize("sampling, kept, played", [(True, [1, 3, 5, 7], 8), (False, [0, 1, 2, 3], 4)])
def test_a10_a_group_without_a_trained_token_does_not_fill_a_batch(sampling, kept, played, tmp_path):
    """Rewards differ in every group. A group that trains nothing is replaced by dynamic sampling; without it, it stays
    in its mini-batch. A trajectory that is both masked and dropped counts once."""
    loop = make_loop(tmp_path, CutOff(), "filters.over_long=mask", f"filters.dynamic_sampling={sampling}")
    loop.step = 1
    with loop.stream:
        groups, metrics = loop.collect()
    assert [group.id for group in groups] == kept and metrics["rollout/prompts"] == played
    assert metrics["filter/dropped"] == played // 2 * CutOff.samples and metrics["filter/dropped_share"] == 0.5


def test_s15_groups_that_are_given_up_are_counted(tmp_path):
    """async.on_stale=drop: prompt 1 never ends, and nobody waits for it."""
    loop = make_loop(tmp_path, Versioned(lambda id, index: None if id == 1 else 0.0), "async.max_staleness=1",
                     "async.on_stale=drop")
    loop.ages.pushed = [0]
    counted = []
    with loop.stream:
        for loop.step in (1, 2, 3):
            counted.append(loop.collect()[1]["async/dropped"])
    assert counted == [0, 0, 1]


@pytest.mark.parametrize("evaluates", [True, False])
def test_s5_x6_an_evaluation_that_was_under_way_is_made_again(evaluates, tmp_path):
    state = LoopState(2, evaluates=evaluates, pushed=[3, 5])
    loop = make_loop(tmp_path, Versioned(), "async.max_staleness=1", state=state)
    with loop.stream:
        loop.begin([])
        assert loop.evaluation.is_running == evaluates
        if evaluates:
            step, future = loop.evaluation._running
            assert step == 2 and future.result() == ["held out"]
    assert loop.ages.pushed == [3, 5, 7]  # what the engines had before, and what they have now


@pytest.mark.parametrize("in_background", [True, False])
def test_x6_a_checkpoint_that_was_written_counts_while_groups_are_waited_for(in_background, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "MEANWHILE_S", 0.01)
    loop = make_loop(tmp_path, Versioned(lambda id, index: 0.2), f"checkpoint.asynchronous={in_background}")
    loop.step = 1
    with loop.stream:
        loop.collect()
    assert ("seal_written" in loop.cluster.policy.calls) == in_background
