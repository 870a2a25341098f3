"""Prompts that extend one another are stored once: in memory, in pickles and in files."""

import copy
import gc
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings

from megastep.samples import store
from megastep.samples.prefix import share_prefixes, shared_prefixes
from megastep.samples.validation import recorded_tokens
from megastep.types import Group, Step, Trajectory

from .rollouts import groups

TURN = 200  # tokens of a response and of an observation


def make_step(index: int, prompt, response, last: bool = False) -> Step:
    count = len(response)
    return Step(
        index=index,
        last=last,
        prompt_ids=np.asarray(prompt, np.int32),
        response_ids=np.asarray(response, np.int32),
        loss_mask=np.ones(count, bool),
        logprobs=np.full(count, -1, np.float32),
        versions=np.array([[0, count]], np.int32),
    )


def long_trajectory(turns: int, dropped: int = 0) -> Trajectory:
    """Each prompt repeats the previous step and adds an observation; `dropped`: how many tokens at
    the end of each prompt the next one leaves out, as a template does with a generation prompt."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, 1000, 20).astype(np.int32)
    steps = []
    for index in range(turns):
        response = random.integers(0, 1000, TURN)
        steps.append(make_step(index, prompt, response, last=index == turns - 1))
        kept = prompt[: len(prompt) - dropped]
        new = random.integers(0, 1000, TURN + dropped)
        prompt = np.concatenate([kept, response, new]).astype(np.int32)
    return Trajectory(0, 0, steps)


def prompts(trajectory: Trajectory) -> list[list[int]]:
    return [step.prompt_ids.tolist() for step in trajectory.steps]


@given(batch=groups(noise=0.3))
@settings(max_examples=100, deadline=None)
def test_sharing_changes_no_prompt(batch):
    for trajectory in (t for group in batch for t in group.trajectories):
        before = prompts(trajectory)
        share_prefixes(trajectory.steps)
        assert prompts(trajectory) == before
        assert [step.prompt_tokens for step in trajectory.steps] == list(map(len, before))
        for step in trajectory.steps:
            assert len(step) == step.prompt_tokens + len(step.response_ids)
            assert step.prompt_ids.dtype == np.int32
        copied = pickle.loads(pickle.dumps(trajectory))
        assert prompts(copied) == before
        share_prefixes(trajectory.steps)  # again
        assert prompts(trajectory) == before


@given(batch=groups(noise=0.3))
@settings(max_examples=60, deadline=None)
def test_the_known_prefix_of_the_last_step_changes_no_count_of_recorded_tokens(batch):
    for trajectory in (t for group in batch for t in group.trajectories):
        for i, (_, ids, shared) in enumerate(shared_prefixes(trajectory.steps)):
            before = trajectory.steps[:i]
            for most in (len(ids) - 1, len(ids) // 2):
                assert recorded_tokens(before, ids, most, shared) == recorded_tokens(
                    before, ids, most
                )


# ---------------------------------------------------------------- sizes


def held_bytes(turns: int, dropped: int) -> int:
    """Memory of a trajectory."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        trajectory = long_trajectory(turns, dropped)
        share_prefixes(trajectory.steps)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trajectory.steps) == turns
    return after - before


def pickled_bytes(turns: int, dropped: int) -> int:
    trajectory = long_trajectory(turns, dropped)
    share_prefixes(trajectory.steps)
    return len(pickle.dumps(pickle.loads(pickle.dumps(trajectory, 5)), 5))


def file_bytes(turns: int, dropped: int, folder) -> int:
    store.write(folder / "f", [Group(0, [long_trajectory(turns, dropped)])])
    store.write(folder / "g", store.read(folder / "f"))
    assert (folder / "g").read_bytes() == (folder / "f").read_bytes()
    return (folder / "f").stat().st_size


@pytest.mark.parametrize("dropped", [0, 5])
def test_memory_and_files_grow_with_the_number_of_turns(dropped, tmp_path):
    """Not with its square: 50 turns take about twice as much as 25."""
    for size in (held_bytes, pickled_bytes, lambda t, d: file_bytes(t, d, tmp_path)):
        small, large = size(25, dropped), size(50, dropped)
        assert 1.5 * small < large < 2.3 * small
        assert large < 50 * TURN * 40  # 2 tokens of 4 bytes a turn, logprobs, mask and objects


# ---------------------------------------------------------------- copies and changes


def shared_pair() -> list[Step]:
    steps = [make_step(0, [1, 2], [3, 4]), make_step(1, [1, 2, 3, 9, 8], [7], last=True)]
    share_prefixes(steps)
    return steps


def test_a_shared_prompt_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match="read-only"):
        shared_pair()[1].prompt_ids[0] = 5


def test_a_shared_prompt_can_be_replaced():
    step = shared_pair()[1]
    step.prompt_ids = np.array([6], np.int32)
    assert step.prompt_ids.tolist() == [6] and step.prompt_tokens == 1
    after = make_step(2, [6, 7, 1], [2])
    after.share_prefix(step, 2)
    assert after.prompt_ids.tolist() == [6, 7, 1]


def test_a_copy_keeps_its_prefix_and_changes_alone():
    steps = shared_pair()
    masked = steps[1].replaced(loss_mask=np.zeros(1, bool))
    assert "prompt_ids" not in vars(masked) and masked.prompt_ids.tolist() == [1, 2, 3, 9, 8]
    assert steps[1].loss_mask.all() and not masked.loss_mask.any()
    assert copy.deepcopy(steps)[1].prompt_ids.tolist() == [1, 2, 3, 9, 8]


def test_a_missing_attribute_is_reported():
    with pytest.raises(AttributeError, match="nothing"):
        shared_pair()[1].nothing  # noqa: B018
