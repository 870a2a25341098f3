"""Held-out evaluation on the stream's event loop, with episodes that a test controls."""

import time
from concurrent.futures import Future

import numpy as np
import pytest

from megastep.errors import RolloutFailed
from megastep.trainer.evaluation import Evaluation
from megastep.types import Group, Step, StopReason, Trajectory

PROMPTS = ["first", "second"]


def trajectory(reward: float, **more) -> Trajectory:
    ids = np.arange(2, dtype=np.int32)
    step = Step(
        index=0,
        last=True,
        prompt_ids=ids,
        response_ids=ids,
        loss_mask=np.ones(2, bool),
        logprobs=np.zeros(2, np.float32),
        versions=np.array([[0, 2]], np.int32),
        reward=reward,
    )
    return Trajectory(0, 0, [step], **more)


class Scene:
    """Stream and pool of an Evaluation: `future` is what the stream returned last."""

    def __init__(self):
        self.asked: list[list] = []
        self.future: Future | None = None
        self.evaluation = Evaluation(self, self, PROMPTS)

    def run(self, prompts, on_trajectory):
        self.asked.append(prompts)
        self.on_trajectory = on_trajectory
        return "coroutine"

    def submit(self, coroutine) -> Future:
        assert coroutine == "coroutine"
        self.future = Future()
        return self.future

    def finish(self, *rewards: float) -> None:
        self.future.set_result([Group(0, [trajectory(reward) for reward in rewards])])


def test_states_of_an_evaluation():
    scene = Scene()
    evaluation = scene.evaluation
    assert not evaluation.is_running and not evaluation.is_done()
    evaluation.begin(3)
    assert scene.asked == [PROMPTS]
    assert evaluation.is_running and not evaluation.is_done()
    scene.finish(1.0, 0.0)
    assert evaluation.is_running and evaluation.is_done()  # its result is not collected yet
    assert evaluation.result()["eval/step"] == 3
    assert not evaluation.is_running and not evaluation.is_done()


def test_a_result_is_returned_once():
    """A training step must not log the metrics of an earlier one."""
    scene = Scene()
    scene.evaluation.begin(1)
    scene.finish(1.0, 0.0)
    assert scene.evaluation.result()["eval/trajectories"] == 2
    with pytest.raises(AssertionError):
        scene.evaluation.result()
    scene.evaluation.begin(5)
    scene.finish(1.0)
    found = scene.evaluation.result()
    assert (found["eval/step"], found["eval/trajectories"]) == (5, 1)


def test_is_done_waits_no_longer_than_it_is_asked_to():
    scene = Scene()
    scene.evaluation.begin(1)
    begun = time.monotonic()
    assert not scene.evaluation.is_done(wait_s=0.2)
    assert 0.2 <= time.monotonic() - begun < 5
    scene.finish(1.0)
    begun = time.monotonic()
    assert scene.evaluation.is_done(wait_s=60)
    assert time.monotonic() - begun < 5


def test_each_trajectory_is_reported():
    scene = Scene()
    seen: list[Trajectory] = []
    scene.evaluation.begin(0, seen.append)
    finished = trajectory(1.0)
    scene.on_trajectory(finished)
    assert seen == [finished]


def test_errors_of_episodes_reach_the_caller_of_result():
    scene = Scene()
    scene.evaluation.begin(1)
    scene.future.set_exception(TimeoutError("engines"))
    assert scene.evaluation.is_done()
    with pytest.raises(TimeoutError, match="engines"):
        scene.evaluation.result()


def test_an_evaluation_of_failed_episodes_only_is_an_error():
    scene = Scene()
    scene.evaluation.begin(1)
    failed = trajectory(0.0, stop_reason=StopReason.ENV_ERROR)
    scene.future.set_result([Group(0, [failed])])
    with pytest.raises(RolloutFailed, match="all 1 episodes failed"):
        scene.evaluation.result()
