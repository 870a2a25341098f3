"""S15, X6: groups that are played ahead of training: none twice, none lost, none too old; none ahead is synchronous."""

import asyncio
import math
import random
import threading
import time

import numpy as np
import pytest

from megastep.errors import RolloutFailed
from megastep.rollout.data import PromptStream
from megastep.rollout.stream import GroupStream, Interrupted
from megastep.types import Step, Trajectory

BATCH, SAMPLES = 4, 3


class Episodes:
    """A pool whose episodes take as long as `seconds` says; remembers who began when, and who is under way."""

    samples, concurrency = SAMPLES, 64

    def __init__(self, seconds=lambda id, index: 0.0):
        self.seconds = seconds
        self.stream: GroupStream | None = None
        self.began: dict[int, int] = {}  # prompt → training steps before it
        self.running: set[tuple[int, int]] = set()

    async def play(self, prompt, index):
        self.began.setdefault(prompt.id, self.stream.step)
        self.running.add((prompt.id, index))
        try:
            seconds = self.seconds(prompt.id, index)
            await (asyncio.sleep(seconds) if seconds is not None else asyncio.Event().wait())
        finally:
            await asyncio.sleep(0.0005)  # an environment takes its time to close
            self.running.remove((prompt.id, index))
        ids = np.arange(2, dtype=np.int32)
        step = Step(
            index=0,
            last=True,
            prompt_ids=ids,
            response_ids=ids,
            loss_mask=np.ones(2, bool),
            logprobs=np.zeros(2, np.float32),
            versions=np.array([[self.stream.step, 2]], np.int32),
        )
        return Trajectory(prompt.id, index, [step])


def make(episodes: Episodes, steps: int, rows: int = 10, **more) -> GroupStream:
    prompts = PromptStream([{"n": n} for n in range(rows)], seed=0)
    episodes.stream = GroupStream(episodes, prompts, BATCH, steps, **more)
    return episodes.stream


def ids(taken) -> list[int]:
    return [group.id for group in taken.groups]


def test_nothing_ahead_is_synchronous():
    """A batch is the next prompts, in order; between batches nothing is under way."""
    episodes = Episodes(lambda id, index: 0.001 * (id % 3))
    with make(episodes, steps=5) as stream:
        for step in range(5):
            assert ids(stream.take(step)) == list(range(step * BATCH, (step + 1) * BATCH))
            assert (
                not episodes.running and not stream.state().ready and not stream.state().unfinished
            )
    assert all(episodes.began[id] == id // BATCH for id in episodes.began)


@pytest.mark.parametrize("ahead", [0, 1])
def test_x6_an_interrupted_batch_is_not_taken_and_not_lost(ahead):
    """A batch that is there is taken; one to be waited for is not."""
    episodes = Episodes(lambda id, index: 0.001 if id < 2 * BATCH else 1.0)
    with make(episodes, steps=5, ahead=ahead) as stream:
        stream.take(0)
        threading.Timer(0.1, stream.interrupt).start()
        taken = ids(stream.take(1))
        with pytest.raises(Interrupted):
            stream.take(2)
        state = stream.state()
    assert taken == list(range(BATCH, 2 * BATCH))
    assert (
        sorted(state.unfinished) == list(range(2 * BATCH, (3 + ahead) * BATCH)) and not state.ready
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_x6_what_a_step_had_before_it_was_interrupted_is_not_lost(ahead):
    """Dynamic sampling asks for more groups; those it has are there again, not to be played twice, of their age."""
    slow = BATCH * (1 + ahead)
    episodes = Episodes(lambda id, index: 0.0 if id < slow else 1.0)
    with make(episodes, steps=5, ahead=ahead) as stream:
        first = stream.take(0)
        stream.interrupt()
        while ahead and len(stream.state().ready) < BATCH:
            time.sleep(0.01)
        more = [stream.take(0, BATCH)] if ahead else []
        with pytest.raises(Interrupted):
            stream.take(0, 2)
        state = stream.state()
    assert (
        [g.id for g in state.ready]
        == [id for taken in (first, *more) for id in ids(taken)]
        == list(range(slow))
    )
    assert state.ready_begun == [0] * slow and min(state.unfinished) == slow
    with make(Episodes(), steps=5, ahead=ahead) as stream:
        stream.restore(0, state)
        assert ids(stream.take(0)) == ids(first)


def test_x6_groups_that_an_interrupted_step_gave_up_are_played_again():
    episodes = Episodes(lambda id, index: 0.0 if id <= 2 * BATCH and id != 1 else None)
    with make(episodes, steps=9, ahead=1, on_stale="drop") as stream:
        stream.take(0)
        stream.take(1)
        stream.interrupt()
        with pytest.raises(Interrupted):
            stream.take(2)
        assert 1 in stream.state().unfinished


def test_x6_also_if_the_step_was_interrupted_when_it_asked_for_more():
    """Dynamic sampling: what the first of its batches gave up is not counted anywhere, so it must be there again."""
    episodes = Episodes(lambda id, index: 0.0 if id <= 3 * BATCH and id != 1 else None)
    with make(episodes, steps=9, ahead=1, on_stale="drop") as stream:
        stream.take(0)
        stream.take(1)
        assert stream.take(2).dropped == 1
        stream.interrupt()
        with pytest.raises(Interrupted):
            stream.take(2, BATCH)
        state = stream.state()
        assert 1 in state.unfinished
        assert {g.id for g in state.ready} | set(state.unfinished) == set(
            range(1 + 2 * BATCH, 5 * BATCH + 1)
        ) | {1}


def test_x6_groups_that_failed_as_a_whole_are_played_again():
    """Else a run that they have ended would end by them again, however often it is begun."""

    class Broken(Episodes):
        async def play(self, prompt, index):
            self.began[prompt.id] = self.stream.step
            return Trajectory(
                prompt.id, index, [], "env_error" if prompt.id > BATCH or index else "done"
            )

    with make(Broken(), steps=9, ahead=1) as stream:
        stream.take(0)
        time.sleep(0.1)
        state = stream.state()
    assert [g.id for g in state.ready] == [BATCH] and state.unfinished == list(
        range(BATCH + 1, 2 * BATCH)
    )
    episodes = Episodes()
    with make(episodes, steps=9, ahead=1) as stream:
        stream.restore(1, state)
        assert ids(stream.take(1)) == list(range(BATCH, 2 * BATCH))
        assert set(state.unfinished) <= set(episodes.began)


@pytest.mark.parametrize("ahead", [0.5, 1, 2, 3.5])
def test_s15_every_prompt_once_and_none_too_old(ahead):
    """Long-tailed episodes; the age is counted from when a prompt really began."""
    steps, numbers = 40, random.Random(ahead)
    episodes = Episodes(lambda id, index: numbers.lognormvariate(-7, 1.5))
    episodes.concurrency = 10  # some have to wait for a place
    seen, ages = [], []
    with make(episodes, steps, ahead=ahead) as stream:
        for step in range(steps):
            taken = stream.take(step)
            assert (
                taken.dropped == 0
                and [len(g.trajectories) for g in taken.groups] == [SAMPLES] * BATCH
            )
            ages += [step - episodes.began[id] for id in ids(taken)]
            seen += ids(taken)
            time.sleep(numbers.random() * 0.003)
    assert sorted(seen) == list(range(steps * BATCH))  # and nothing was begun in vain
    assert len(episodes.began) == steps * BATCH
    assert 0 < max(ages) <= math.ceil(ahead)


def test_work_goes_on_while_training_does_as_far_ahead_as_allowed():
    episodes = Episodes(lambda id, index: 0.0 if id < BATCH else None)
    with make(episodes, steps=9, ahead=1.5) as stream:
        stream.take(0)
        time.sleep(0.1)
        assert {id for id, _ in episodes.running} == set(range(BATCH, BATCH + 6))


def test_slow_groups_are_waited_for_and_counted():
    """Prompt 1 is slow: at step 1 it is due, and no batch is made without it."""
    episodes = Episodes(lambda id, index: 0.3 if id == 1 else 0.0)
    with make(episodes, steps=4, ahead=1) as stream:
        first, second = stream.take(0), stream.take(1)
    assert 1 not in ids(first) and first.waited == 0
    assert 1 in ids(second) and (second.waited, second.dropped) == (1, 0)


def test_or_dropped_and_counted():
    """Prompt 1 never ends; its place is taken by another and training never waits."""
    episodes = Episodes(lambda id, index: None if id == 1 else 0.0)
    with make(episodes, steps=6, ahead=1, on_stale="drop") as stream:
        taken = [stream.take(step) for step in range(6)]
        time.sleep(0.05)
        assert not episodes.running
    assert [t.dropped for t in taken] == [0, 0, 1, 0, 0, 0] and not any(t.waited for t in taken)
    assert sorted(id for t in taken for id in ids(t)) == [0, *range(2, 6 * BATCH + 1)]


def test_x6_what_state_tells_is_enough_to_go_on():
    """Ended anywhere and begun again from its state, twenty times: every prompt is in one batch."""
    steps, numbers, seen = 40, random.Random(1), []
    state, step = None, 0
    while step < steps:
        with make(
            Episodes(lambda id, index: numbers.lognormvariate(-7, 1.5)), steps, ahead=1.5
        ) as stream:
            if state is not None:
                stream.restore(step, state)
            for _ in range(min(2, steps - step)):
                seen += ids(stream.take(step))
                step += 1
                time.sleep(numbers.random() * 0.003)
            state = stream.state()
            stream.submit(asyncio.sleep(0.001)).result()  # what happens now is lost
    assert sorted(seen) == list(range(steps * BATCH))


def test_ready_groups_survive_with_their_age():
    episodes = Episodes()
    with make(episodes, steps=9, ahead=2) as stream:
        stream.take(0)
        time.sleep(0.1)
        state = stream.state()
    assert (
        len(state.ready) == 2 * BATCH
        and not state.unfinished
        and state.ready_begun == [0] * 2 * BATCH
    )
    again = Episodes()
    with make(again, steps=9, ahead=2) as stream:
        stream.restore(1, state)
        assert ids(stream.take(1)) == list(range(BATCH, 2 * BATCH))
        assert ids(stream.take(2)) == list(range(2 * BATCH, 3 * BATCH))
    assert not set(again.began) & set(range(3 * BATCH))  # they were not played again


def test_leaving_cancels_what_is_under_way():
    episodes = Episodes(lambda id, index: None)
    with make(episodes, steps=9, ahead=1) as stream:
        waiting = stream.submit(stream._take(0, BATCH))
        time.sleep(0.05)
        assert episodes.running
    assert not episodes.running and waiting.cancelled()


@pytest.mark.parametrize(
    "changed", [dict(ahead=0), dict(ahead=0.5), dict(ahead=1), dict(batch=2, ahead=2)], ids=str
)
def test_going_on_with_less_patience_drops_what_is_too_old_and_does_not_hang(changed):
    with make(Episodes(), steps=9, ahead=2) as stream:
        stream.take(0)
        time.sleep(0.2)
        state = stream.state()
    assert len(state.ready) == 2 * BATCH
    episodes, seen, dropped = Episodes(), [], 0
    prompts, batch = (
        PromptStream([{"n": n} for n in range(10)], seed=0),
        changed.get("batch", BATCH),
    )
    with GroupStream(episodes, prompts, batch, 9, changed["ahead"]) as episodes.stream:
        episodes.stream.restore(1, state)
        for step in range(1, 9):
            taken = episodes.stream.submit(episodes.stream._take(step, batch)).result(timeout=20)
            seen, dropped = seen + ids(taken), dropped + taken.dropped
    assert len(set(seen)) == len(seen) == 8 * batch
    assert len(set(range(BATCH, 3 * BATCH)) - set(seen)) == dropped > 0


def test_more_groups_for_the_same_step():
    """Dynamic sampling: the places of prompts that were dropped."""
    episodes = Episodes()
    with make(episodes, steps=3) as stream:
        assert [ids(stream.take(0)), ids(stream.take(0, 1)), ids(stream.take(1))] == [
            [0, 1, 2, 3],
            [4],
            [5, 6, 7, 8],
        ]


def test_a_defect_in_an_episode_reaches_the_trainer():
    def fail(id, index):
        raise ZeroDivisionError("a defect")

    with (
        make(Episodes(fail), steps=9, ahead=1) as stream,
        pytest.raises(ZeroDivisionError, match="a defect"),
    ):
        stream.take(0)


@pytest.mark.parametrize(
    "error, message",
    [
        (SystemExit(3), r"raised SystemExit\(3\)"),
        (asyncio.CancelledError(), "of prompt . cancelled itself"),
    ],
)
def test_what_is_no_exception_reaches_the_trainer_too(error, message):
    """Nobody waits for ever for an episode that is gone; and the thread of the episodes can be ended."""

    def fail(id, index):
        raise error

    with (
        make(Episodes(fail), steps=9, ahead=1) as stream,
        pytest.raises(RolloutFailed, match=message),
    ):
        stream.submit(stream._take(0, None)).result(timeout=20)


def test_speed_counts_the_time_in_which_episodes_ran():
    episodes = Episodes(lambda id, index: 0.2)
    with make(episodes, steps=2) as stream:
        stream.take(0)
        time.sleep(0.6)
        assert BATCH * SAMPLES * 2 / 0.5 < stream.tokens_per_s() < BATCH * SAMPLES * 2 / 0.19
