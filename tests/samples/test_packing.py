"""Packing: every loss row once, under every budget, alignment and number of ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastep.samples import lay_out
from megastep.samples.packing import best_cuts, cut, mini_batches, pack
from megastep.samples.trie import PACK_LAYOUTS, fold
from megastep.types import FREE, Group

from .rollouts import (
    expected_rows,
    group_of,
    groups,
    path_of,
    routing_of,
    rows_of,
    samples_of,
    trajectory,
)

A, B, C, D, E, OBS = 1, 2, 3, 4, 5, 6
some = settings(max_examples=120, deadline=None)


def longest(samples):
    return max((len(path) for (*_, path) in expected_rows(samples)), default=1)


# ---------------------------------------------------------------- properties


@some
@given(
    groups(noise=0.1),
    st.sampled_from(PACK_LAYOUTS),
    st.integers(1, 4),
    st.integers(0, 30),
    st.integers(1, 4),
)
def test_s13_s14_x4_every_row_once_under_every_budget_and_number_of_ranks(
    batch, pack_layout, ranks, spare, align
):
    samples = samples_of(*batch)
    budget = longest(samples) + spare + align  # holds the longest path with its padding
    ranked, _ = lay_out(samples, ranks, budget, align, pack_layout)
    tries = [m.trie for rank in ranked for m in rank]
    assert rows_of(tries) == expected_rows(samples)
    assert len(ranked) == ranks and len({len(rank) for rank in ranked}) == 1
    micro_batch_of = {}  # (group, trajectory, step) → micro-batch
    for number, trie in enumerate(tries):
        assert 0 < len(trie) <= budget and len(trie) % align == 0
        loss = trie.loss
        step_ids = list(zip(loss.group.tolist(), loss.trajectory.tolist(), loss.step.tolist()))
        for step_id in step_ids:
            is_padding = step_id[0] < 0
            assert is_padding or micro_batch_of.setdefault(step_id, number) == number
        assert len(loss.step_starts()) == len(set(step_ids))  # the rows of a step are contiguous


@some
@given(
    groups(noise=0.2, routing=("full", "delta")),
    st.sampled_from(["owner", "split"]),
    st.integers(0, 20),
)
def test_s12_cutting_and_packing_keep_the_routing(batch, on_conflict, spare):
    samples = samples_of(*batch)
    wanted = routing_of(fold(samples, "flat", on_conflict)[0])
    ranked, _ = lay_out(
        samples, 2, longest(samples) + spare, pack_layout="trie", on_conflict=on_conflict
    )
    assert routing_of([m.trie for rank in ranked for m in rank]) == wanted


@some
@given(groups(max_groups=1, routing=("none",)), st.integers(0, 15))
def test_x1_cuts_repeat_as_few_tokens_as_possible(batch, spare):
    """Compared with all ways to cut the leaves, in depth-first order, into runs that fit."""
    samples = samples_of(*batch)
    tries, _ = fold(samples)
    if not tries:
        return
    (trie,) = tries
    budget = longest(samples) + spare
    last_rows = np.append(trie.loss.step_starts()[1:], len(trie.loss)) - 1
    leaves = np.unique(trie.loss.src[last_rows]).tolist()
    if len(leaves) > 9:
        return
    paths = [set(path_of(trie, leaf).tolist()) for leaf in leaves]

    def sizes(cuts):
        bounds = [0, *cuts, len(leaves)]
        return [len(set().union(*paths[a:b])) for a, b in zip(bounds, bounds[1:])]

    choices = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(leaves)), n) for n in range(len(leaves))
    )
    least = min(sum(s) for s in map(sizes, choices) if max(s) <= budget)
    assert sum(map(len, cut(trie, budget))) == least


# ---------------------------------------------------------------- cutting


def test_best_cuts_repeat_the_fewest_tokens():
    """The worked example of `best_cuts`."""
    assert best_cuts(path=[6, 7, 7], shared=[0, 4, 5], budget=9) == [0, 1]
    assert best_cuts(path=[6, 7, 7], shared=[0, 4, 5], budget=11) == [0]
    assert best_cuts(path=[6, 7, 7], shared=[0, 4, 5], budget=7) == [0, 1, 2]


def test_cut_repeats_the_shared_path_as_context_only():
    group = group_of(trajectory(([A, A, A], [B, B, B])), trajectory(([A, A, A], [C, C, C])))
    (trie,), _ = fold(samples_of(group))
    assert len(trie) == 3 + 2 + 2
    first, second = cut(trie, 6)
    assert first.tokens.tolist() == [A, A, A, B, B] and second.tokens.tolist() == [A, A, A, C, C]
    assert first.loss.target.tolist() == [B, B, B] and second.loss.target.tolist() == [C, C, C]
    assert [len(t) for t in cut(trie, 7)] == [7]


def test_a_path_over_the_budget_names_the_trajectory_its_length_and_the_setting():
    group = group_of(
        trajectory(([A], [B])), trajectory(([A], [B]), ([A, B, OBS, OBS, OBS], [C, D])), id=7
    )
    with pytest.raises(ValueError) as error:
        lay_out(samples_of(group), ranks=1, budget_tokens=5)
    assert str(error.value) == (
        "group 7, trajectory 1, step 1: 6 tokens in one path do not fit a micro-batch of 5; "
        "raise train.micro_batch_tokens"
    )
    lay_out(samples_of(group), ranks=1, budget_tokens=6)
    # A budget of 7 holds 4 tokens when aligned to 4.
    with pytest.raises(ValueError, match="micro-batch of 4"):
        lay_out(samples_of(group), ranks=1, budget_tokens=7, align_tokens=4)


# ---------------------------------------------------------------- S13: mini-batches


def batch_of(prompts, turns=lambda i: 1):
    made = []
    for i in range(prompts):
        steps = [([A] * (k + 1), [B]) for k in range(turns(i))]
        made.append(group_of(*[trajectory(*steps) for _ in range(i % 3 + 1)], id=i))
    return made


@pytest.mark.parametrize("turns", [lambda i: 1, lambda i: 1 + i % 9])
def test_s13_the_number_of_optimizer_steps_depends_on_prompts_alone(turns):
    parts = mini_batches(batch_of(12, turns), prompts=4)
    assert [[g.id for g in part] for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@given(st.integers(0, 40), st.integers(1, 12))
def test_s13_no_prompt_is_lost_when_mini_batches_are_uneven(prompts, size):
    parts = mini_batches([Group(i, []) for i in range(prompts)], size)
    assert [g.id for part in parts for g in part] == list(range(prompts))
    assert len(parts) == -(-prompts // size)
    assert all(0 < len(part) <= size for part in parts)
    assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1


def test_s13_no_row_of_groups_of_unequal_size_is_lost():
    samples = samples_of(*batch_of(11, lambda i: 1 + i % 4))
    for ranks in (1, 2, 3, 5, 8):
        for budget in (4, 6, 9):
            ranked, _ = lay_out(samples, ranks, budget)
            assert rows_of([m.trie for rank in ranked for m in rank]) == expected_rows(samples)


# ---------------------------------------------------------------- S14: padding


def test_s14_a_padding_micro_batch_contributes_nothing():
    group = group_of(trajectory(([A], [B, C])))
    group.trajectories[0].steps[0].routing = np.ones((2, 1, 2), np.uint8)
    ranked, _ = lay_out(samples_of(group), ranks=3, budget_tokens=8, align_tokens=4)
    assert [[m.real_tokens for m in rank] for rank in ranked] == [[2], [0], [0]]
    padding = ranked[1][0].trie
    assert len(padding) == 4
    loss = padding.loss
    assert len(loss) == 1  # forward and backward run and give 0
    assert (loss.weight == 0).all()
    assert (loss.advantage == 0).all()
    assert np.isfinite(loss.rollout_logprob).all()
    assert (loss.group < 0).all() and (loss.trajectory < 0).all() and (loss.step < 0).all()
    assert (padding.routing() == FREE).all()  # no routing replay for padding


def test_s14_padding_is_a_separate_sequence():
    samples = samples_of(group_of(trajectory(([A, B], [C, D]))))
    ranked, _ = lay_out(samples, ranks=1, budget_tokens=8, align_tokens=8)
    trie = ranked[0][0].trie
    assert trie.tokens.tolist() == [A, B, C, 0, 0, 0, 0, 0]
    assert trie.end.tolist() == [3, 3, 3, 8, 8, 8, 8, 8]
    assert trie.sequence_starts().tolist() == [0, 3]
    assert trie.loss.src.tolist() == [1, 2] and ranked[0][0].real_tokens == 3


def test_s14_every_rank_runs_without_samples():
    ranked, _ = lay_out([], ranks=2, budget_tokens=8)
    assert [len(rank) for rank in ranked] == [1, 1]
    assert all(m.trie.loss.weight.sum() == 0 for rank in ranked for m in rank)


# ---------------------------------------------------------------- balance


def test_ranks_are_balanced_by_cost():
    rng = np.random.default_rng(0)
    tries = []
    for i in range(200):
        n = int(rng.integers(50, 900))
        tries += fold(samples_of(group_of(trajectory((rng.integers(1, 9, n), [A, B])), id=i)))[0]
    total = sum(map(len, tries))
    ranked = pack(tries, ranks=4, budget_tokens=4096, attention_tokens=512)
    loads = [sum(len(m.trie) + m.trie.position.sum() / 512 for m in rank) for rank in ranked]
    assert max(loads) < 1.02 * np.mean(loads)
    assert len(ranked[0]) <= 1.2 * total / 4096 / 4 + 1
    for round_ in zip(*ranked):  # ranks synchronize in every round
        costs = [len(m.trie) + m.trie.position.sum() / 512 for m in round_]
        assert max(costs) < 1.15 * min(costs)


def test_pack_frees_the_tries():
    tries, _ = fold(samples_of(*batch_of(3)))
    pack(tries, ranks=1, budget_tokens=64)
    assert tries == []
