"""Routing by reference: folding and packing by row numbers is the same as by values."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastep.errors import RolloutError
from megastep.samples import packing
from megastep.samples.routing import (
    Layout,
    expanded,
    fetch,
    release,
    routing_of_batches,
    routing_of_groups,
    run_lengths,
    store_rows,
    tables_of,
)
from megastep.samples.trie import PACK_LAYOUTS, fold
from megastep.samples.validation import validate
from megastep.types import ExpertShape, Group, Routes, Trajectory

from .rollouts import (
    LAYERS,
    TOP_K,
    by_reference,
    group_of,
    groups,
    resolver,
    routing_of,
    samples_of,
    step,
)

some = settings(max_examples=120, deadline=None)
STAGES = [(0,), (1,)]
layouts = st.builds(
    Layout,
    stages=st.sampled_from([STAGES, [(0, 1)]]),
    whole_tokens=st.sampled_from([0, 30, 1000]),
    part_tokens=st.sampled_from([0, 5, 1000]),
    on_conflict=st.sampled_from(["owner", "split"]),
)


def without(group: Group, dropped: int) -> Group:
    kept = [t for t in group.trajectories if t.index != dropped]
    return Group(group.id, kept)


@some
@given(
    groups(noise=0.3, routing=("full", "delta")),
    layouts,
    st.sampled_from(PACK_LAYOUTS),
    st.sampled_from(["owner", "split"]),
    st.integers(0, 4),
)
def test_x11_folding_by_rows_equals_folding_by_values(
    batch, layout, pack_layout, on_conflict, dropped
):
    """Also after a filter has dropped a trajectory, which may have owned the routing."""
    references: dict = {}
    by_rows = [by_reference(group, layout, references) for group in batch]
    batch = [without(group, dropped) for group in batch]
    by_rows = [without(group, dropped) for group in by_rows]
    wanted_tries, wanted_report = fold(samples_of(*batch), pack_layout, on_conflict)
    tries, report = fold(samples_of(*by_rows), pack_layout, on_conflict)
    assert report == wanted_report
    for trie, wanted in zip(tries, wanted_tries, strict=True):
        assert (trie.routes is None) == (wanted.routes is None)
        if trie.routes is not None:
            fetch(trie.routes.rows, None, resolver(references))
            assert np.array_equal(trie.routing(), wanted.routing())
        assert np.array_equal(trie.tokens, wanted.tokens)
        assert np.array_equal(trie.loss.src, wanted.loss.src)
    assert routing_of(tries) == routing_of(wanted_tries)


@some
@given(groups(noise=0.2, routing=("full", "delta")), layouts)
def test_every_step_reads_back_what_it_recorded(batch, layout):
    references: dict = {}
    for group in batch:
        made = by_reference(group, layout, references)
        fetch(routing_of_groups([made]), None, resolver(references))
        for old, new in zip(group.trajectories, made.trajectories):
            for a, b in zip(old.steps, new.steps):
                assert (a.routing is None) == (b.routing is None)
                if a.routing is not None:
                    assert np.array_equal(b.routing.values(), a.routing)
                    assert b.routing.shape == a.routing.shape and b.routing_end == a.routing_end
                    assert b.routing.dtype == a.routing.dtype


@some
@given(groups(noise=0.2, routing=("full",)), layouts, st.integers(0, 1), st.integers(1, 3))
def test_a_stage_fetches_its_layers_of_its_micro_batches(batch, layout, layer, ranks):
    references: dict = {}
    by_rows = [by_reference(group, layout, references) for group in batch]
    tries, _ = fold(samples_of(*by_rows))
    wanted, _ = fold(samples_of(*batch))
    micro_batches = packing.pack(tries, ranks, 64, 2)
    expected = packing.pack(wanted, ranks, 64, 2)
    layers = slice(layer, layer + 1)
    for mine, theirs in zip(micro_batches, expected):
        sent = pickle.loads(pickle.dumps(mine))
        given_tables = tables_of(routing_of_batches(mine))
        for table, before in zip(tables_of(routing_of_batches(sent)), given_tables, strict=True):
            assert not table.references
            stage = next(s for s, own in enumerate(table.stages) if layer in own)
            table.references = {stage: before.references[stage]}
        fetched = fetch(routing_of_batches(sent), range(layer, layer + 1), resolver(references))
        assert fetched == sum(
            array.nbytes
            for table in tables_of(routing_of_batches(sent))
            for array in table.arrays.values()
        )
        for a, b in zip(sent, theirs, strict=True):
            if b.trie.routes is not None:
                assert np.array_equal(a.trie.routing(layers), b.trie.routing(layers))
        release(routing_of_batches(sent))
        assert all(not table.arrays for table in tables_of(routing_of_batches(sent)))


def turns(*prompts_and_responses, offset=0) -> Group:
    """Single-turn trajectories of one prompt, whose routing follows from the position."""
    made = []
    for index, (prompt, response) in enumerate(prompts_and_responses):
        tokens = len(prompt) + len(response) - 1
        one = step(0, prompt, response)
        one.routing = np.arange(tokens * LAYERS * TOP_K, dtype=np.uint8).reshape(-1, LAYERS, TOP_K)
        if index:
            one.routing = one.routing + np.uint8(offset)
        made.append(Trajectory(0, index, [one]))
    return group_of(*made)


def test_a_common_prompt_is_stored_once_and_trajectories_have_their_own_parts():
    group = turns(([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4], [7, 8]), ([1, 2, 3, 4], [9, 8, 7]))
    made = store_rows(group.trajectories, Layout(STAGES))
    # The prompt's 4 rows, then one row of each response, and one more of the last.
    assert made.table.bounds.tolist() == [0, 4, 5, 6, 8]
    assert [rows.tolist() for rows in made.rows.values()] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 5],
        [0, 1, 2, 3, 6, 7],
    ]
    assert {key: array.shape for key, array in made.objects} == {
        (stage, part): (rows, 1, TOP_K)
        for part, rows in enumerate([4, 1, 1, 2])
        for stage in (0, 1)
    }
    assert made.table.nbytes == 8 * LAYERS * TOP_K


def test_short_trajectories_share_a_part_and_a_small_group_is_one_part():
    group = turns(([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4], [7, 8]), ([1, 2, 3, 4], [9, 8, 7]))
    pairs = store_rows(group.trajectories, Layout(STAGES, part_tokens=2))
    assert pairs.table.bounds.tolist() == [0, 4, 6, 8]
    whole = store_rows(group.trajectories, Layout(STAGES, whole_tokens=8))
    assert whole.table.bounds.tolist() == [0, 8]


def test_rows_that_lose_a_conflict_are_apart_unless_they_are_needed():
    group = turns(([1, 2], [5, 6]), ([1, 2], [7, 8]), offset=1)
    owner = store_rows(group.trajectories, Layout(STAGES))
    # Trajectory 1 lost its prompt's two rows; its response has a row of its own.
    assert owner.table.bounds.tolist() == [0, 0, 3, 4, 6]
    assert owner.rows[1, 0].tolist() == [4, 5, 3]
    split = store_rows(group.trajectories, Layout(STAGES, on_conflict="split"))
    assert split.table.bounds.tolist() == [0, 0, 3, 6]
    tries, _ = fold(samples_of(by_reference(group, Layout(STAGES), {})))
    assert {int(p) for rows in tries[0].routes.rows for p in rows.parts()} == {1, 2}


def test_layers_of_interleaved_stages():
    group = turns(([1, 2], [5, 6]))
    one = group.trajectories[0].steps[0]
    one.routing = np.arange(3 * 4 * TOP_K, dtype=np.uint8).reshape(3, 4, TOP_K)
    references: dict = {}
    made = by_reference(group, Layout([(0, 2), (1, 3)]), references)
    routing = made.trajectories[0].steps[0].routing
    assert fetch([routing], [2], resolver(references)) == 3 * 2 * TOP_K
    assert np.array_equal(routing.values(slice(2, 3)), one.routing[:, 2:3])
    fetch([routing], None, resolver(references))
    assert np.array_equal(routing.values(), one.routing)


def test_experts_above_127_are_gathered_as_wider_numbers():
    group = turns(([1, 2], [5, 6]))
    group.trajectories[0].steps[0].routing[1, 1] = 200
    references: dict = {}
    routing = by_reference(group, Layout(STAGES), references).trajectories[0].steps[0].routing
    fetch([routing], None, resolver(references))
    routes = Routes(np.array([0], np.int32), [routing], (LAYERS, TOP_K))
    assert routes.gather(3, slice(0, 1)).dtype == np.int8
    assert routes.gather(3).dtype == np.int16 and routes.gather(3)[1, 1].tolist() == [200, 200]


@pytest.mark.parametrize("rows", [[], [3], [0, 1, 2, 7, 8], [5, 4, 3], [2, 2]])
def test_rows_as_runs(rows):
    runs = run_lengths(np.array(rows, np.int32))
    assert expanded(runs).tolist() == rows and expanded(runs).dtype == np.int32
    assert len(runs) == sum(a != b + 1 for a, b in zip(rows[1:], rows)) + bool(rows)


def test_a_group_without_routing_stores_nothing():
    group = group_of(Trajectory(0, 0, [step(0, [1, 2], [3])]))
    assert store_rows(group.trajectories, Layout(STAGES)) is None


def test_routing_that_cannot_be_numbered_is_an_error():
    group = turns(([1, 2], [5, 6]), ([1, 2], [7, 8]))
    group.trajectories[1].steps[0].routing = np.zeros((9, LAYERS, TOP_K), np.uint8)
    with pytest.raises(RolloutError, match="trajectory 1, step 0: routing ends before token 9"):
        store_rows(group.trajectories, Layout(STAGES))
    group.trajectories[1].steps[0].routing = np.zeros((3, LAYERS, 3), np.uint8)
    with pytest.raises(RolloutError, match="one shape and dtype per group"):
        store_rows(group.trajectories, Layout(STAGES))
    with pytest.raises(RolloutError, match="step 0: routing of 2 layers, the model has 3"):
        store_rows(group.trajectories[:1], Layout([(0,), (1, 2)]))


def test_s10_validation_reports_what_was_found_before_storing():
    shape = ExpertShape(experts=8, top_k=TOP_K, moe_layers=(True,) * LAYERS)
    group = by_reference(turns(([1, 2], [5, 6])), Layout(STAGES), {})
    validate([group], experts=shape)
    routing = group.trajectories[0].steps[0].routing
    routing.problem = "expert 9 recorded; the model has 0 to 7"
    with pytest.raises(RolloutError, match="step 0: expert 9 recorded"):
        validate([group], experts=shape)
    with pytest.raises(RolloutError, match="the model has .tokens, 3 layers"):
        validate([group], experts=ExpertShape(8, TOP_K, (True,) * 3))
