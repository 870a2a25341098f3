"""Folding: loss rows and routing are the same under every pack layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastep.samples.prefix import common_prefix
from megastep.samples.trie import PACK_LAYOUTS, fold, restrict
from megastep.types import FREE

from .rollouts import (
    EOS,
    LAYERS,
    TOP_K,
    expected_rows,
    group_of,
    groups,
    path_of,
    routing_of,
    rows_of,
    samples_of,
    step,
    trajectory,
    true_experts,
)

A, B, C, D, E, OBS = 1, 2, 3, 4, 5, 6
some = settings(max_examples=120, deadline=None)


def sequences(*trajectories, pack_layout="merge"):
    tries, report = fold(samples_of(group_of(*trajectories)), pack_layout)
    return [t.tokens.tolist() for t in tries], tries, report


# ---------------------------------------------------------------- properties


@some
@given(groups(noise=0.1), st.sampled_from(PACK_LAYOUTS), st.sampled_from(["owner", "split"]))
def test_s1_s3_s11_s12_x4_loss_rows_are_the_same_under_every_layout(
    batch, pack_layout, on_conflict
):
    """Rows with their identity, advantage, weight and the tokens that predict them."""
    samples = samples_of(*batch)
    tries, _ = fold(samples, pack_layout, on_conflict)
    assert rows_of(tries) == expected_rows(samples)


@some
@given(groups(), st.sampled_from(PACK_LAYOUTS))
def test_s10_s12_paths_have_the_recorded_routing_where_steps_agree(batch, pack_layout):
    samples = samples_of(*batch)
    tries, report = fold(samples, pack_layout)
    assert report.routes_conflicting == 0
    recorded_paths = set()  # (group, path)
    for s in samples:
        ids = np.concatenate([s.step.prompt_ids, s.step.response_ids]).tolist()
        for k in range(s.step.routing_start, s.step.routing_end):
            recorded_paths.add((s.group, tuple(ids[: k + 1])))
    for trie in tries:
        if trie.routes is None:
            continue
        routing = trie.routing()
        for token in range(len(trie)):
            path = tuple(trie.tokens[path_of(trie, token)].tolist())
            group = trie.loss.group[0].item()
            if (group, path) in recorded_paths:
                wanted = true_experts(path)
            else:
                wanted = np.full((LAYERS, TOP_K), FREE)
            assert routing[token].tolist() == wanted.tolist()


@some
@given(groups(noise=0.2, routing=("full", "delta")), st.sampled_from(["owner", "split"]))
def test_s12_routing_along_a_path_does_not_depend_on_the_pack_layout(batch, on_conflict):
    flat, merge, trie = (
        routing_of(fold(samples_of(*batch), pack_layout, on_conflict)[0])
        for pack_layout in PACK_LAYOUTS
    )
    assert flat == merge == trie


@some
@given(groups(noise=0.2, routing=("full", "delta")), st.sampled_from(PACK_LAYOUTS))
def test_d2_split_keeps_the_routing_each_step_recorded(batch, pack_layout):
    samples = samples_of(*batch)
    found = routing_of(fold(samples, pack_layout, "split")[0])
    for s in samples:
        for j in np.flatnonzero(s.step.loss_mask).tolist():
            at = len(s.step.prompt_ids) + j
            mine = found[(s.group, s.trajectory, s.step.index, at)]
            for k in range(s.step.routing_start, min(s.step.routing_end, at)):
                assert mine[k] == s.step.routing[k - s.step.routing_start].tolist()


@some
@given(groups(noise=0.3, routing=("full",)))
def test_d2_under_split_a_delta_is_equivalent_to_a_full_record(batch):
    """A step without the routing of its prefix takes it from the step before, not from others."""
    samples = samples_of(*batch)
    trajectories = [t for g in batch for t in g.trajectories]
    for t in trajectories:
        for before, after in zip(t.steps, t.steps[1:]):
            if before.routing is not None and after.routing is not None:
                start = shared_routing(before, after)
                if before.routing_start == 0:
                    after.routing[:start] = before.routing[:start]
    wanted = routing_of(fold(samples, "trie", "split")[0])
    for t in trajectories:
        for before, after in reversed(list(zip(t.steps, t.steps[1:]))):
            if before.routing is not None and after.routing is not None:
                start = shared_routing(before, after)
                after.routing = after.routing[start:]
                after.routing_start = start
    assert routing_of(fold(samples, "trie", "split")[0]) == wanted


def shared_routing(before, after) -> int:
    """The number of leading prompt tokens of `after` whose routing both steps recorded."""
    both = [np.concatenate([s.prompt_ids, s.response_ids]) for s in (before, after)]
    return min(common_prefix(*both), before.routing_end, after.routing_end, len(after.prompt_ids))


@some
@given(groups())
def test_x1_a_trie_has_every_needed_token_once(batch):
    samples = samples_of(*batch)
    needed = set()  # (group, path)
    for s in samples:
        for *_, path in expected_rows([s]):
            needed |= {(s.group, path[: k + 1]) for k in range(len(path))}
    tries, report = fold(samples)
    found = []
    for t in tries:
        group = t.loss.group[0].item()
        found += [(group, tuple(t.tokens[path_of(t, k)].tolist())) for k in range(len(t))]
    assert len(found) == len(set(found)) == report.tokens_distinct
    assert set(found) == needed


# ---------------------------------------------------------------- S11: prefix merging, case by case


def test_s11_generation_only_responses_merge_and_the_delta_is_the_observation():
    found, tries, report = sequences(
        trajectory(([A], [B, C]), ([A, B, C, OBS], [D]), ([A, B, C, OBS, D, OBS, OBS], [E, B]))
    )
    assert found == [[A, B, C, OBS, D, OBS, OBS, E]]
    assert tries[0].loss.target.tolist() == [B, C, D, E, B]
    assert tries[0].loss.src.tolist() == [0, 1, 3, 6, 7]
    assert (report.sequences_before, report.sequences_after) == (3, 1)
    assert (report.tokens_before, report.tokens_after) == (2 + 4 + 8, 8)


def test_s11_an_observation_in_the_response_gives_an_empty_delta():
    found, tries, _ = sequences(trajectory(([A], [B, OBS], [True, False]), ([A, B, OBS], [C, D])))
    assert found == [[A, B, OBS, C]]
    assert tries[0].loss.target.tolist() == [B, C, D]


def test_s11_both_kinds_of_observation_in_one_trajectory():
    found, _, _ = sequences(
        trajectory(([A], [B, OBS], [True, False]), ([A, B, OBS], [C]), ([A, B, OBS, C, OBS], [D]))
    )
    assert found == [[A, B, OBS, C, OBS]]


def test_s11_a_chain_broken_in_the_middle_gives_two_rows():
    turns = trajectory(([A], [B]), ([A, B, OBS], [C]), ([A, D], [E]), ([A, D, E, OBS], [B]))
    found, tries, report = sequences(turns)
    assert found == [[A, B, OBS], [A, D, E, OBS]]
    assert [t.loss.step.tolist() for t in tries] == [[0, 1], [2, 3]]
    assert report.sequences_after == 2
    assert sequences(turns, pack_layout="trie")[0] == [[A, B, OBS, D, E, OBS]]


def test_s11_a_prefix_of_prompt_and_response_but_not_of_the_prompt_does_not_merge():
    # The next prompt begins with the first prompt but drops half of the response.
    found, _, _ = sequences(trajectory(([A, B], [C, D]), ([A, B, C, OBS], [E])))
    assert found == [[A, B, C], [A, B, C, OBS]]
    # The first step is a prefix of the second prompt + response, but not of the prompt alone.
    found, _, _ = sequences(trajectory(([A, B], [C, D]), ([A, B, C], [D, E])))
    assert found == [[A, B, C], [A, B, C, D]]


def test_s11_trajectories_do_not_merge_with_each_other():
    two = trajectory(([A], [B]), ([A, B, OBS], [C]))
    found, tries, _ = sequences(trajectory(([A], [B])), two, trajectory(([A], [D])))
    assert found == [[A], [A, B, OBS], [A]]
    assert [t.loss.trajectory.tolist() for t in tries] == [[0], [1, 1], [2]]


def test_s11_all_masked_steps_train_no_token_and_break_no_chain():
    turns = trajectory(([A], [B]), ([A, B, OBS], [C], [False]), ([A, B, OBS, C, OBS], [D]))
    assert sequences(turns)[0] == [[A, B, OBS, C, OBS]]
    found, tries, report = sequences(trajectory(([A], [B, C], [False, False])))
    assert found == [] and report.sequences_before == 0


def test_s11_missing_logprobs_stay_missing():
    turns = trajectory(([A], [B]), ([A, B, OBS], [C]))
    turns.steps[0].logprobs = None
    turns.steps[1].logprobs = np.array([-0.5], np.float32)
    _, tries, _ = sequences(turns)
    assert np.isnan(tries[0].loss.rollout_logprob[0]) and tries[0].loss.rollout_logprob[1] == -0.5


def test_s11_tokens_grow_linearly_with_turns():
    def tokens(turns, pack_layout):
        steps, prompt = [], [A]
        for _ in range(turns):
            steps.append((prompt, [B, C]))
            prompt = prompt + [B, C, OBS]
        return fold(samples_of(group_of(trajectory(*steps))), pack_layout)[1].tokens_after

    for pack_layout in ("merge", "trie"):
        assert (tokens(20, pack_layout), tokens(40, pack_layout)) == (3 * 20 - 1, 3 * 40 - 1)
    assert tokens(40, "flat") > 3.5 * tokens(20, "flat")


def test_s12_merging_keeps_the_advantage_of_each_step():
    """A merged sequence has one advantage per step."""
    _, tries, _ = sequences(trajectory(([A], [B, C]), ([A, B, C, OBS], [D])))
    assert tries[0].loss.advantage.tolist() == [0.0, 0.0, 1 / 64]


# ---------------------------------------------------------------- S3, S8, S9


def test_s3_the_advantage_applies_to_each_steps_own_positions():
    """Steps of unequal prompts and responses, all of which must get a gradient."""
    turns = trajectory(([A, A, A], [B]), ([A, B, OBS, OBS, OBS, OBS], [C, C, C, D]), ([D], [E, E]))
    for pack_layout in PACK_LAYOUTS:
        for trie in fold(samples_of(group_of(turns)), pack_layout)[0]:
            for s in turns.steps:
                rows = trie.loss.step == s.index
                if rows.any():
                    assert trie.loss.target[rows].tolist() == s.response_ids.tolist()
                    assert trie.loss.advantage[rows].tolist() == [s.index / 64] * len(
                        s.response_ids
                    )


def test_s8_an_appended_eos_is_in_the_sequence_and_out_of_the_loss():
    turns = trajectory(([A], [B, EOS], [True, False]), ([A, B, EOS, OBS], [C]))
    found, tries, _ = sequences(turns)
    assert found == [[A, B, EOS, OBS]]
    assert EOS not in tries[0].loss.target.tolist()


def test_s9_the_observation_is_context_of_the_next_step():
    _, tries, _ = sequences(trajectory(([A], [B]), ([A, B, OBS, OBS], [C])))
    assert OBS in tries[0].tokens.tolist() and OBS not in tries[0].loss.target.tolist()


# ---------------------------------------------------------------- routing


def recorded(made, numbers, start=0):
    per_token = np.array(numbers, np.uint8)[:, None, None]
    made.routing = per_token + np.zeros((1, LAYERS, TOP_K), np.uint8)
    made.routing_start = start
    return made


def experts(trie):
    return trie.routing()[:, 0, 0].tolist()


def two_steps(first, second, start=0):
    turns = trajectory(([A], [B, C]), ([A, B, C, OBS], [D, E]))
    recorded(turns.steps[0], first)
    recorded(turns.steps[1], second, start)
    return turns


@pytest.mark.parametrize("pack_layout", ["merge", "trie"])
def test_s10_the_last_sampled_token_takes_its_routing_from_the_next_step(pack_layout):
    turns = two_steps([10, 11], [10, 11, 12, 13, 14])
    assert experts(fold(samples_of(group_of(turns)), pack_layout)[0][0]) == [10, 11, 12, 13, 14]
    turns = two_steps([10, 11], [12, 13, 14], start=2)
    assert experts(fold(samples_of(group_of(turns)), pack_layout)[0][0]) == [10, 11, 12, 13, 14]


def test_s10_flat_takes_the_routing_of_earlier_steps():
    turns = two_steps([10, 11], [12, 13, 14], start=2)
    first, second = fold(samples_of(group_of(turns)), "flat")[0]
    assert (experts(first), experts(second)) == ([10, 11], [10, 11, 12, 13, 14])


def test_s10_a_token_without_recorded_routing_is_free():
    group = group_of(two_steps([10, 11], [12, 13, 14], start=2))
    recorded(group.trajectories[0].steps[1], [13, 14], start=3)  # validation would reject it
    assert experts(fold(samples_of(group))[0][0]) == [10, 11, FREE, 13, 14]


def test_s10_appended_eos_empty_response_and_missing_routing_shift_no_token():
    turns = trajectory(
        ([A], [B, EOS], [True, False]),
        ([A, B, EOS, OBS], []),
        ([A, B, EOS, OBS, OBS], [C]),
        ([A, B, D], [E]),
    )
    recorded(turns.steps[0], [10])  # the engine forwarded A and sampled B; EOS was appended
    recorded(turns.steps[1], [11, 12], start=1)
    recorded(turns.steps[2], [13, 14], start=3)
    group = group_of(turns)
    (trie,) = fold(samples_of(group))[0]
    assert trie.tokens.tolist() == [A, B, EOS, OBS, OBS, D]
    assert experts(trie) == [10, 11, 12, 13, 14, FREE]


def test_s10_a_group_without_recorded_routing_has_none():
    assert sequences(trajectory(([A], [B])))[1][0].routing() is None


def test_d2_the_step_that_sampled_a_token_owns_it():
    turns = two_steps([10, 11], [20, 21, 22, 23, 24])
    samples = samples_of(group_of(turns))
    (trie,), report = fold(samples)
    assert experts(trie) == [10, 11, 22, 23, 24]  # A: first recorded there; B: sampled there
    assert (report.routes_compared, report.routes_conflicting) == (2, 2)
    # A later step that sampled the token has priority over an earlier one with it in its prompt.
    context = trajectory(([A, B, C], [D]))
    sampler = trajectory(([A], [B, C, D]))
    recorded(context.steps[0], [10, 11, 12])
    recorded(sampler.steps[0], [20, 21, 22])
    (trie,), _ = fold(samples_of(group_of(context, sampler)))
    assert experts(trie) == [10, 21, 22]


def test_d2_split_separates_paths_from_the_first_conflict_on():
    turns = two_steps([10, 11], [10, 21, 22, 23, 24])
    (trie,), report = fold(samples_of(group_of(turns)), "trie", "split")
    assert trie.tokens.tolist() == [A, B, B, C, OBS, D]
    assert experts(trie) == [10, 11, 21, 22, 23, 24]
    assert report.routes_conflicting == 1
    merged, _ = fold(samples_of(group_of(turns)), "merge", "split")
    assert [t.tokens.tolist() for t in merged] == [[A, B], [A, B, C, OBS, D]]


def test_d2_under_split_a_step_inherits_routing_from_its_own_trajectory():
    other = trajectory(([A, B], [C]))
    turns = trajectory(([A, B], [C]), ([A, B, C, OBS], [D]), ([A, B, C, OBS, D, OBS], [E]))
    recorded(other.steps[0], [10, 11])
    # The second step recorded nothing, the third one what follows the tokens of the first.
    recorded(turns.steps[0], [20, 21])
    recorded(turns.steps[2], [22, 23, 24, 25], start=2)
    for pack_layout in PACK_LAYOUTS:
        tries, _ = fold(samples_of(group_of(other, turns)), pack_layout, "split")
        found = routing_of(tries)
        assert [row[0][0] for row in found[(0, 1, 1, 4)]] == [20, 21, 22, 23]
        assert [row[0][0] for row in found[(0, 1, 2, 6)]] == [20, 21, 22, 23, 24, 25]


def test_d2_under_split_steps_that_agree_with_each_other_share_tokens():
    group = group_of(*[trajectory(([A, B], [C])) for _ in range(3)])
    for t, number in zip(group.trajectories, (10, 20, 20)):
        recorded(t.steps[0], [number, number])
    (trie,), report = fold(samples_of(group), "trie", "split")
    assert experts(trie) == [10, 10, 20, 20] and report.routes_conflicting == 4


def test_d2_routing_is_int8_where_it_fits_and_can_be_sliced_by_layer():
    turns = two_steps([10, 11], [12, 13, 14], start=2)
    (trie,), _ = fold(samples_of(group_of(turns)))
    assert trie.routing().dtype == np.int8
    assert trie.routing(slice(1, 2)).shape == (5, 1, TOP_K)
    turns.steps[1].routing[0] = 200
    (trie,), _ = fold(samples_of(group_of(turns)))
    assert trie.routing().dtype == np.int16 and trie.routing()[2, 0, 0] == 200


# ---------------------------------------------------------------- tries


def test_restrict_keeps_the_paths_of_some_rows():
    """The worked example of `restrict`."""
    T, END = 7, 8
    turns = trajectory(([A, B], [T, C, END]), ([A, B, C, END, OBS], [D, END]))
    (trie,), _ = fold(samples_of(group_of(turns)))
    assert trie.tokens.tolist() == [A, B, T, C, C, END, OBS, D]
    part = restrict(trie, trie.loss.src == 6)
    assert part.tokens.tolist() == [A, B, C, END, OBS]
    assert part.end.tolist() == [5] * 5
    assert part.loss.src.tolist() == [4] and part.loss.target.tolist() == [D]


def test_nodes_and_sequences_of_a_trie():
    (trie,), report = fold(
        samples_of(group_of(trajectory(([A, B], [C, D, D]), ([A, B, D, OBS], [E]))))
    )
    assert trie.tokens.tolist() == [A, B, C, D, D, OBS]
    assert trie.node_starts.tolist() == [0, 2, 4]
    assert trie.sequence_starts().tolist() == [0] and trie.branches
    assert trie.sequences == report.sequences_after == 2
    (path,), _ = fold(samples_of(group_of(trajectory(([A, B], [C, D])))))
    assert not path.branches


@pytest.mark.parametrize("kind", ["pack_layout", "on_conflict"])
def test_unknown_choices_are_rejected(kind):
    with pytest.raises(ValueError, match=r"= other: must be one of"):
        fold([], **{kind: "other"})


def test_folding_without_trained_tokens_gives_no_tries():
    assert fold([])[0] == []
    assert step(0, [A], []).routing is None
    assert fold(samples_of(group_of(trajectory(([A], [])))))[0] == []


def test_d2_the_type_of_routing_follows_from_the_gathered_layers():
    turns = two_steps([10, 11], [12, 13, 14], start=2)
    turns.steps[1].routing[0, 0] = 255  # reads as FREE in int8
    (trie,), _ = fold(samples_of(group_of(turns)))
    whole = trie.routing()
    assert whole.dtype == np.int16 and whole[2, 0].tolist() == [255] * TOP_K
    first = trie.routing(slice(0, 1))
    assert first.dtype == np.int16 and first[:, 0].tolist() == whole[:, 0].tolist()
    others = trie.routing(slice(1, None))
    assert others.dtype == np.int8 and others.tolist() == whole[:, 1:].tolist()
