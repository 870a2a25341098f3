"""S15, X6: no group of a rollout ahead of training is lost, repeated or stale; ahead = 0 is
synchronous."""

import asyncio
import math
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megastep.errors import RolloutFailed
from megastep.rollout.data import PromptStream
from megastep.rollout.pool import Pool
from megastep.rollout.stream import Entry, GroupStream, Interrupted
from megastep.types import (
    Group,
    RoutingTable,
    Step,
    StopReason,
    StoredRouting,
    Trajectory,
)

BATCH = 4
SAMPLES = 3


class Episodes(Pool):
    """A pool whose episodes take `seconds` each, or never end (None); records start and end."""

    samples_per_prompt = SAMPLES
    concurrency = 64

    def __init__(self, seconds=lambda id, index: 0.0):
        self.seconds = seconds
        self.stream: GroupStream | None = None
        self.began: dict[int, int] = {}  # prompt → training step of its first episode
        self.running: set[tuple[int, int]] = set()

    async def run_episode(self, prompt, index):
        self.began.setdefault(prompt.id, self.stream.step)
        self.running.add((prompt.id, index))
        try:
            seconds = self.seconds(prompt.id, index)
            await (asyncio.sleep(seconds) if seconds is not None else asyncio.Event().wait())
        finally:
            await asyncio.sleep(0.0005)  # closing the environment
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


def test_ahead_0_is_synchronous():
    """A batch is the next prompts, in order; between batches no episode runs."""
    episodes = Episodes(lambda id, index: 0.001 * (id % 3))
    with make(episodes, steps=5) as stream:
        for step in range(5):
            assert ids(stream.take(step)) == list(range(step * BATCH, (step + 1) * BATCH))
            assert (
                not episodes.running and not stream.state().ready and not stream.state().unfinished
            )
    assert all(episodes.began[id] == id // BATCH for id in episodes.began)


@pytest.mark.parametrize("ahead", [0, 1])
def test_x6_an_interrupted_batch_is_neither_taken_nor_lost(ahead):
    """A complete batch is taken; an incomplete one is not."""
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
def test_x6_groups_taken_for_an_interrupted_step_are_not_lost(ahead):
    """Dynamic sampling takes more groups; the earlier ones are ready again, with their start."""
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


def test_x6_groups_dropped_for_an_interrupted_step_start_over():
    episodes = Episodes(lambda id, index: 0.0 if id <= 2 * BATCH and id != 1 else None)
    with make(episodes, steps=9, ahead=1, on_stale="drop") as stream:
        stream.take(0)
        stream.take(1)
        stream.interrupt()
        with pytest.raises(Interrupted):
            stream.take(2)
        assert 1 in stream.state().unfinished


def test_x6_groups_dropped_before_an_interrupted_second_take_start_over():
    """Dynamic sampling: the drops of the first take were not counted, so they are outstanding."""
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


def test_x6_groups_in_which_every_episode_failed_start_over():
    """Otherwise a run that they ended would end again at every resume."""

    class Broken(Episodes):
        async def run_episode(self, prompt, index):
            self.began[prompt.id] = self.stream.step
            fails = prompt.id > BATCH or index > 0
            reason = StopReason.ENV_ERROR if fails else StopReason.DONE
            return Trajectory(prompt.id, index, [], reason)

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
def test_s15_every_prompt_once_and_none_stale(ahead):
    """Long-tailed episodes; staleness counts from the start of the first episode."""
    steps = 40
    numbers = random.Random(ahead)
    episodes = Episodes(lambda id, index: numbers.lognormvariate(-7, 1.5))
    episodes.concurrency = 10  # some episodes are queued
    seen = []
    staleness = []
    with make(episodes, steps, ahead=ahead) as stream:
        for step in range(steps):
            taken = stream.take(step)
            assert (
                taken.dropped == 0
                and [len(g.trajectories) for g in taken.groups] == [SAMPLES] * BATCH
            )
            staleness += [step - episodes.began[id] for id in ids(taken)]
            seen += ids(taken)
            time.sleep(numbers.random() * 0.003)
    assert sorted(seen) == list(range(steps * BATCH))
    assert len(episodes.began) == steps * BATCH  # no superfluous episode
    assert 0 < max(staleness) <= math.ceil(ahead)


def test_episodes_run_ahead_of_training_up_to_the_limit():
    episodes = Episodes(lambda id, index: 0.0 if id < BATCH else None)
    with make(episodes, steps=9, ahead=1.5) as stream:
        stream.take(0)
        time.sleep(0.1)
        assert {id for id, _ in episodes.running} == set(range(BATCH, BATCH + 6))


def test_the_worked_example_of_missing():
    """See GroupStream._missing: 20 to 23 run, 24 and 25 are complete."""
    stream = GroupStream(Episodes(), PromptStream([{}], seed=0), batch=2, steps=9, ahead=2)
    stream.step = 4
    prompts = {id: SimpleNamespace(id=id) for id in range(20, 26)}
    started = [2, 3, 3, 3, 4, 4]
    entries = [Entry(prompts[id], start) for id, start in zip(prompts, started, strict=True)]
    stream._entries = dict(zip(prompts, entries))
    entries[4].group = Group(24, [])
    entries[5].group = Group(25, [])
    assert stream._missing(stream._oldest_complete(2)) == 2
    entries[0].group = Group(20, [])
    assert stream._missing(stream._oldest_complete(2)) == 1
    entries[1].group = Group(21, [])
    assert stream._missing(stream._oldest_complete(2)) == 0


def test_on_stale_wait_waits_for_slow_groups_and_counts_them():
    """Prompt 1 is slow: at step 1 it is due, and no batch is taken without it."""
    episodes = Episodes(lambda id, index: 0.3 if id == 1 else 0.0)
    with make(episodes, steps=4, ahead=1) as stream:
        first = stream.take(0)
        second = stream.take(1)
    assert 1 not in ids(first) and first.waited == 0
    assert 1 in ids(second) and (second.waited, second.dropped) == (1, 0)


def test_on_stale_drop_drops_slow_groups_and_counts_them():
    """Prompt 1 never ends; another prompt replaces it and training never waits."""
    episodes = Episodes(lambda id, index: None if id == 1 else 0.0)
    with make(episodes, steps=6, ahead=1, on_stale="drop") as stream:
        taken = [stream.take(step) for step in range(6)]
        time.sleep(0.05)
        assert not episodes.running
    assert [t.dropped for t in taken] == [0, 0, 1, 0, 0, 0] and not any(t.waited for t in taken)
    assert sorted(id for t in taken for id in ids(t)) == [0, *range(2, 6 * BATCH + 1)]


def test_x6_state_suffices_to_resume():
    """Resumed from its state twenty times, at any point: every prompt is in one batch."""
    steps = 40
    numbers = random.Random(1)
    seen = []
    state = None
    step = 0
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
            stream.submit(asyncio.sleep(0.001)).result()  # progress that the state does not have
    assert sorted(seen) == list(range(steps * BATCH))


def test_restored_groups_keep_their_start():
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
    assert not set(again.began) & set(range(3 * BATCH))  # their episodes did not run again


def test_leaving_cancels_running_episodes():
    episodes = Episodes(lambda id, index: None)
    with make(episodes, steps=9, ahead=1) as stream:
        waiting = stream.submit(stream._take(0, BATCH))
        time.sleep(0.05)
        assert episodes.running
    assert not episodes.running and waiting.cancelled()


@pytest.mark.parametrize(
    "changed", [dict(ahead=0), dict(ahead=0.5), dict(ahead=1), dict(batch=2, ahead=2)], ids=str
)
def test_resuming_with_a_smaller_max_staleness_drops_stale_groups_and_does_not_hang(changed):
    with make(Episodes(), steps=9, ahead=2) as stream:
        stream.take(0)
        time.sleep(0.2)
        state = stream.state()
    assert len(state.ready) == 2 * BATCH
    episodes = Episodes()
    seen = []
    dropped = 0
    prompts = PromptStream([{"n": n} for n in range(10)], seed=0)
    batch = changed.get("batch", BATCH)
    with GroupStream(episodes, prompts, batch, 9, changed["ahead"]) as episodes.stream:
        episodes.stream.restore(1, state)
        for step in range(1, 9):
            taken = episodes.stream.submit(episodes.stream._take(step, batch)).result(timeout=20)
            seen += ids(taken)
            dropped += taken.dropped
    assert len(set(seen)) == len(seen) == 8 * batch
    assert len(set(range(BATCH, 3 * BATCH)) - set(seen)) == dropped > 0


def test_more_groups_for_the_same_step():
    """Dynamic sampling: replacements for dropped prompts."""
    episodes = Episodes()
    with make(episodes, steps=3) as stream:
        assert [ids(stream.take(0)), ids(stream.take(0, 1)), ids(stream.take(1))] == [
            [0, 1, 2, 3],
            [4],
            [5, 6, 7, 8],
        ]


def test_an_exception_in_an_episode_reaches_the_trainer():
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
def test_a_base_exception_in_an_episode_reaches_the_trainer(error, message):
    """`take` does not hang, and the thread of the episodes can be joined."""

    def fail(id, index):
        raise error

    with (
        make(Episodes(fail), steps=9, ahead=1) as stream,
        pytest.raises(RolloutFailed, match=message),
    ):
        stream.submit(stream._take(0, None)).result(timeout=20)


def test_tokens_per_s_counts_the_time_of_running_episodes():
    episodes = Episodes(lambda id, index: 0.2)
    with make(episodes, steps=2) as stream:
        stream.take(0)
        time.sleep(0.6)
        speed = stream.metrics()["rollout/tokens_per_s"]
        assert BATCH * SAMPLES * 2 / 0.5 < speed < BATCH * SAMPLES * 2 / 0.19


# ---------------------------------------------------------------- stored routing


class Stored(Episodes):
    """Every group has 100 bytes of routing in the object store."""

    def __init__(self, groups: float, seconds=lambda id, index: 0.0):
        super().__init__(seconds)
        self.routing_limit_bytes = 100 * groups
        self.forgotten: list[int] = []

    async def close_group(self, prompt, trajectories):
        table = RoutingTable(np.array([0, 50]), [(0,)], top_k=2, dtype=np.dtype(np.uint8))
        trajectories[0].steps[0].routing = StoredRouting(table, np.arange(3, dtype=np.int32))
        return Group(prompt.id, trajectories)

    def forget_group(self, prompt):
        self.forgotten.append(prompt.id)


def settled(stream: GroupStream) -> int:
    """The number of outstanding groups, once all of them are complete."""
    while stream.state().unfinished:
        time.sleep(0.005)
    return len(stream.state().ready)


def test_prompts_are_held_back_while_routing_fills_its_share():
    """Three batches ahead are allowed, but a batch that is trained on and one more fill the
    share."""
    with make(Stored(2 * BATCH), steps=9, ahead=3) as stream:
        stream.take(0)
        assert settled(stream) == 3 * BATCH  # nothing was known about the size of a group
        stream.metrics()
        counts = []
        for step in range(1, 6):
            stream.take(step)
            counts.append(settled(stream))
        assert counts == [2 * BATCH, BATCH, BATCH, BATCH, BATCH]
        assert stream.metrics() | {"rollout/tokens_per_s": 0.0} == {
            "rollout/tokens_per_s": 0.0,
            "worker/routing_gb": 2 * BATCH * 100 / 1e9,
            "worker/prompts_held_back": 2 * BATCH,
        }
        assert stream.metrics()["worker/prompts_held_back"] == 0


@pytest.mark.parametrize("groups", [0, 0.5, BATCH - 1])
def test_a_share_that_is_too_small_for_a_batch_does_not_block(groups):
    with make(Stored(groups), steps=4, ahead=2) as stream:
        taken = [id for step in range(4) for id in ids(stream.take(step))]
        assert sorted(taken) == list(range(4 * BATCH))
        assert len(ids(stream.take(3, 3))) == 3  # dynamic sampling asks for more


def test_a_group_that_is_cancelled_is_forgotten():
    episodes = Stored(100, lambda id, index: None if id == 1 else 0.0)
    with make(episodes, steps=4, ahead=1, on_stale="drop") as stream:
        stream.take(0)
        stream.take(1)
        assert 1 in stream.state().unfinished and not episodes.forgotten
        assert 1 not in ids(stream.take(2))
        assert episodes.forgotten == [1]
    assert len(stream.pool.running) == 0


def test_an_error_of_closing_a_group_ends_the_next_take():
    class Broken(Stored):
        async def close_group(self, prompt, trajectories):
            raise RolloutFailed("the routing was lost 3 times")

    with make(Broken(1), steps=4) as stream, pytest.raises(RolloutFailed, match="lost 3 times"):
        stream.take(0)
