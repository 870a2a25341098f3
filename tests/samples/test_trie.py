import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastep.samples.prefix import common_prefix
from megastep.samples.trie import PACK_LAYOUTS, fold
from megastep.types import FREE

from .rollouts import (
    EOS,
    LAYERS,
    TOP_K,
    expected_rows,
    experts_of,
    group_of,
    groups,
    path_of,
    rows_of,
    samples_of,
    step,
    trajectory,
    true_experts,
)

A, B, C, D, E, O = 1, 2, 3, 4, 5, 6
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
    """Rows, whose they are, advantage, weight and the tokens that predict them."""
    samples = samples_of(*batch)
    tries, _ = fold(samples, pack_layout, on_conflict)
    assert rows_of(tries) == expected_rows(samples)


@some
@given(groups(), st.sampled_from(PACK_LAYOUTS))
def test_s10_s12_where_records_agree_every_path_has_them(batch, pack_layout):
    samples = samples_of(*batch)
    tries, report = fold(samples, pack_layout)
    assert report.routes_conflicting == 0
    known = {}  # (group, path) → recorded by some step
    for s in samples:
        ids = np.concatenate([s.step.prompt_ids, s.step.response_ids]).tolist()
        known |= {
            (s.group, tuple(ids[: k + 1])): True
            for k in range(s.step.routing_start, s.step.routing_end)
        }
    for trie in tries:
        if trie.routes is None:
            continue
        routing = trie.routing()
        for token in range(len(trie)):
            path = tuple(trie.tokens[path_of(trie, token)].tolist())
            group = trie.loss.group[0].item()
            wanted = (
                true_experts(path) if (group, path) in known else np.full((LAYERS, TOP_K), FREE)
            )
            assert routing[token].tolist() == wanted.tolist()


@some
@given(groups(noise=0.2, routing=("full", "delta")), st.sampled_from(["owner", "split"]))
def test_s12_experts_along_a_path_do_not_depend_on_the_layout(batch, on_conflict):
    flat, merge, trie = (
        experts_of(fold(samples_of(*batch), pack_layout, on_conflict)[0])
        for pack_layout in PACK_LAYOUTS
    )
    assert flat == merge == trie


@some
@given(groups(noise=0.2, routing=("full", "delta")), st.sampled_from(PACK_LAYOUTS))
def test_d2_split_keeps_what_each_step_recorded(batch, pack_layout):
    samples = samples_of(*batch)
    found = experts_of(fold(samples, pack_layout, "split")[0])
    for s in samples:
        for j in np.flatnonzero(s.step.loss_mask).tolist():
            at = len(s.step.prompt_ids) + j
            mine = found[(s.group, s.trajectory, s.step.index, at)]
            for k in range(s.step.routing_start, min(s.step.routing_end, at)):
                assert mine[k] == s.step.routing[k - s.step.routing_start].tolist()


@some
@given(groups(noise=0.3, routing=("full",)))
def test_d2_under_split_a_delta_is_as_good_as_a_full_record(batch):
    """A step that leaves out what the step before it recorded keeps that step's experts, not a stranger's."""
    samples = samples_of(*batch)
    for t in (t for g in batch for t in g.trajectories):
        for before, after in zip(t.steps, t.steps[1:]):
            if before.routing is None or after.routing is None:
                continue
            both = [np.concatenate([s.prompt_ids, s.response_ids]) for s in (before, after)]
            start = min(
                common_prefix(*both), before.routing_end, after.routing_end, len(after.prompt_ids)
            )
            if before.routing_start == 0:
                after.routing[:start] = before.routing[:start]
    wanted = experts_of(fold(samples, "trie", "split")[0])
    for t in (t for g in batch for t in g.trajectories):
        for before, after in reversed(list(zip(t.steps, t.steps[1:]))):
            if before.routing is not None and after.routing is not None:
                both = [np.concatenate([s.prompt_ids, s.response_ids]) for s in (before, after)]
                start = min(
                    common_prefix(*both),
                    before.routing_end,
                    after.routing_end,
                    len(after.prompt_ids),
                )
                after.routing, after.routing_start = after.routing[start:], start
    assert experts_of(fold(samples, "trie", "split")[0]) == wanted


@some
@given(groups())
def test_x1_every_distinct_token_once_and_no_other(batch):
    samples = samples_of(*batch)
    needed = {
        (s.group, path[: k + 1])
        for s in samples
        for (*_, path) in expected_rows([s])
        for k in range(len(path))
    }
    tries, report = fold(samples)
    found = [
        (t.loss.group[0].item(), tuple(t.tokens[path_of(t, k)].tolist()))
        for t in tries
        for k in range(len(t))
    ]
    assert len(found) == len(set(found)) == report.tokens_distinct
    assert set(found) == needed


# ---------------------------------------------------------------- S11: prefix merging, case by case


def test_s11_generation_only_responses_merge_and_the_delta_is_the_observation():
    found, tries, report = sequences(
        trajectory(([A], [B, C]), ([A, B, C, O], [D]), ([A, B, C, O, D, O, O], [E, B]))
    )
    assert found == [[A, B, C, O, D, O, O, E]]
    assert tries[0].loss.target.tolist() == [B, C, D, E, B]
    assert tries[0].loss.src.tolist() == [0, 1, 3, 6, 7]
    assert (report.sequences_before, report.sequences_after) == (3, 1)
    assert (report.tokens_before, report.tokens_after) == (2 + 4 + 8, 8)


def test_s11_observation_already_in_the_response_gives_an_empty_delta():
    found, tries, _ = sequences(trajectory(([A], [B, O], [True, False]), ([A, B, O], [C, D])))
    assert found == [[A, B, O, C]]
    assert tries[0].loss.target.tolist() == [B, C, D]


def test_s11_both_kinds_in_one_trajectory():
    found, _, _ = sequences(
        trajectory(([A], [B, O], [True, False]), ([A, B, O], [C]), ([A, B, O, C, O], [D]))
    )
    assert found == [[A, B, O, C, O]]


def test_s11_a_chain_broken_in_the_middle_gives_two_rows():
    turns = trajectory(([A], [B]), ([A, B, O], [C]), ([A, D], [E]), ([A, D, E, O], [B]))
    found, tries, report = sequences(turns)
    assert found == [[A, B, O], [A, D, E, O]]
    assert [t.loss.step.tolist() for t in tries] == [[0, 1], [2, 3]]
    assert report.sequences_after == 2
    assert sequences(turns, pack_layout="trie")[0] == [[A, B, O, D, E, O]]


def test_s11_a_prefix_of_prompt_and_response_but_not_of_the_prompt_does_not_merge():
    # The next prompt begins with the first prompt but drops half of the response.
    found, _, _ = sequences(trajectory(([A, B], [C, D]), ([A, B, C, O], [E])))
    assert found == [[A, B, C], [A, B, C, O]]
    # The whole first step is a prefix of the second prompt + response, but the prompt alone is too short.
    found, _, _ = sequences(trajectory(([A, B], [C, D]), ([A, B, C], [D, E])))
    assert found == [[A, B, C], [A, B, C, D]]


def test_s11_mixed_lengths_and_trajectories_do_not_run_together():
    two = trajectory(([A], [B]), ([A, B, O], [C]))
    found, tries, _ = sequences(trajectory(([A], [B])), two, trajectory(([A], [D])))
    assert found == [[A], [A, B, O], [A]]
    assert [t.loss.trajectory.tolist() for t in tries] == [[0], [1, 1], [2]]


def test_s11_all_masked_steps_train_nothing_and_break_nothing():
    turns = trajectory(([A], [B]), ([A, B, O], [C], [False]), ([A, B, O, C, O], [D]))
    assert sequences(turns)[0] == [[A, B, O, C, O]]
    found, tries, report = sequences(trajectory(([A], [B, C], [False, False])))
    assert found == [] and report.sequences_before == 0


def test_s11_missing_logprobs_stay_missing():
    turns = trajectory(([A], [B]), ([A, B, O], [C]))
    turns.steps[0].logprobs = None
    turns.steps[1].logprobs = np.array([-0.5], np.float32)
    _, tries, _ = sequences(turns)
    assert np.isnan(tries[0].loss.rollout_logprob[0]) and tries[0].loss.rollout_logprob[1] == -0.5


def test_s11_tokens_grow_linearly_with_turns():
    def tokens(turns, pack_layout):
        steps, prompt = [], [A]
        for _ in range(turns):
            steps.append((prompt, [B, C]))
            prompt = prompt + [B, C, O]
        return fold(samples_of(group_of(trajectory(*steps))), pack_layout)[1].tokens_after

    for pack_layout in ("merge", "trie"):
        assert (tokens(20, pack_layout), tokens(40, pack_layout)) == (3 * 20 - 1, 3 * 40 - 1)
    assert tokens(40, "flat") > 3.5 * tokens(20, "flat")


def test_s12_merging_keeps_the_advantage_of_each_step():
    """A reward per step survives: the merged row has as many advantages as it has steps."""
    _, tries, _ = sequences(trajectory(([A], [B, C]), ([A, B, C, O], [D])))
    assert tries[0].loss.advantage.tolist() == [0.0, 0.0, 1 / 64]


# ---------------------------------------------------------------- S3, S8, S9


def test_s3_the_advantage_lands_on_each_steps_own_positions():
    """Steps of unequal prompts and responses: copying the last step's row would leave the others without gradient."""
    turns = trajectory(([A, A, A], [B]), ([A, B, O, O, O, O], [C, C, C, D]), ([D], [E, E]))
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
    turns = trajectory(([A], [B, EOS], [True, False]), ([A, B, EOS, O], [C]))
    found, tries, _ = sequences(turns)
    assert found == [[A, B, EOS, O]]
    assert EOS not in tries[0].loss.target.tolist()


def test_s9_the_observation_is_context_of_the_next_step():
    _, tries, _ = sequences(trajectory(([A], [B]), ([A, B, O, O], [C])))
    assert O in tries[0].tokens.tolist() and O not in tries[0].loss.target.tolist()


# ---------------------------------------------------------------- experts


def recorded(made, numbers, start=0):
    made.routing = np.array(numbers, np.uint8)[:, None, None] + np.zeros(
        (1, LAYERS, TOP_K), np.uint8
    )
    made.routing_start = start
    return made


def experts(trie):
    return trie.routing()[:, 0, 0].tolist()


def two_steps(first, second, start=0):
    turns = trajectory(([A], [B, C]), ([A, B, C, O], [D, E]))
    recorded(turns.steps[0], first)
    recorded(turns.steps[1], second, start)
    return turns


@pytest.mark.parametrize("pack_layout", ["merge", "trie"])
def test_s10_the_last_sampled_token_takes_its_experts_from_the_next_step(pack_layout):
    turns = two_steps([10, 11], [10, 11, 12, 13, 14])
    assert experts(fold(samples_of(group_of(turns)), pack_layout)[0][0]) == [10, 11, 12, 13, 14]
    turns = two_steps([10, 11], [12, 13, 14], start=2)
    assert experts(fold(samples_of(group_of(turns)), pack_layout)[0][0]) == [10, 11, 12, 13, 14]


def test_s10_flat_takes_what_earlier_steps_recorded():
    turns = two_steps([10, 11], [12, 13, 14], start=2)
    first, second = fold(samples_of(group_of(turns)), "flat")[0]
    assert (experts(first), experts(second)) == ([10, 11], [10, 11, 12, 13, 14])


def test_s10_a_token_nobody_forwarded_is_free():
    group = group_of(two_steps([10, 11], [12, 13, 14], start=2))
    recorded(group.trajectories[0].steps[1], [13, 14], start=3)  # which validation would refuse
    assert experts(fold(samples_of(group))[0][0]) == [10, 11, FREE, 13, 14]


def test_s10_appended_eos_empty_response_and_missing_records_shift_nothing():
    turns = trajectory(
        ([A], [B, EOS], [True, False]),
        ([A, B, EOS, O], []),
        ([A, B, EOS, O, O], [C]),
        ([A, B, D], [E]),
    )
    recorded(turns.steps[0], [10])  # the engine saw A and sampled B; EOS came later
    recorded(turns.steps[1], [11, 12], start=1)
    recorded(turns.steps[2], [13, 14], start=3)
    group = group_of(turns)
    (trie,) = fold(samples_of(group))[0]
    assert trie.tokens.tolist() == [A, B, EOS, O, O, D]
    assert experts(trie) == [10, 11, 12, 13, 14, FREE]


def test_s10_a_group_without_records_has_no_routing():
    assert sequences(trajectory(([A], [B])))[1][0].routing() is None


def test_d2_the_step_that_sampled_a_token_owns_it():
    turns = two_steps([10, 11], [20, 21, 22, 23, 24])
    samples = samples_of(group_of(turns))
    (trie,), report = fold(samples)
    assert experts(trie) == [10, 11, 22, 23, 24]  # A: the first to see it; B: sampled there
    assert (report.routes_compared, report.routes_conflicting) == (2, 2)
    # A later step that sampled the token wins over an earlier one that had it as context.
    context, sampler = trajectory(([A, B, C], [D])), trajectory(([A], [B, C, D]))
    recorded(context.steps[0], [10, 11, 12]), recorded(sampler.steps[0], [20, 21, 22])
    (trie,), _ = fold(samples_of(group_of(context, sampler)))
    assert experts(trie) == [10, 21, 22]


def test_d2_split_separates_from_the_first_disagreement_on():
    turns = two_steps([10, 11], [10, 21, 22, 23, 24])
    (trie,), report = fold(samples_of(group_of(turns)), "trie", "split")
    assert trie.tokens.tolist() == [A, B, B, C, O, D]
    assert experts(trie) == [10, 11, 21, 22, 23, 24]
    assert report.routes_conflicting == 1
    merged, _ = fold(samples_of(group_of(turns)), "merge", "split")
    assert [t.tokens.tolist() for t in merged] == [[A, B], [A, B, C, O, D]]


def test_d2_under_split_what_a_step_did_not_record_it_has_from_its_own_trajectory():
    stranger = trajectory(([A, B], [C]))
    turns = trajectory(([A, B], [C]), ([A, B, C, O], [D]), ([A, B, C, O, D, O], [E]))
    recorded(stranger.steps[0], [10, 11])
    recorded(
        turns.steps[0], [20, 21]
    )  # the second step recorded nothing, the third what came after the first
    recorded(turns.steps[2], [22, 23, 24, 25], start=2)
    for pack_layout in PACK_LAYOUTS:
        tries, _ = fold(samples_of(group_of(stranger, turns)), pack_layout, "split")
        found = experts_of(tries)
        assert [row[0][0] for row in found[(0, 1, 1, 4)]] == [20, 21, 22, 23]
        assert [row[0][0] for row in found[(0, 1, 2, 6)]] == [20, 21, 22, 23, 24, 25]


def test_d2_steps_that_agree_against_the_owner_still_share():
    group = group_of(*[trajectory(([A, B], [C])) for _ in range(3)])
    for t, number in zip(group.trajectories, (10, 20, 20)):
        recorded(t.steps[0], [number, number])
    (trie,), report = fold(samples_of(group), "trie", "split")
    assert experts(trie) == [10, 10, 20, 20] and report.routes_conflicting == 4


def test_d2_routing_is_small_where_it_can_be_and_can_be_asked_for_by_layer():
    turns = two_steps([10, 11], [12, 13, 14], start=2)
    (trie,), _ = fold(samples_of(group_of(turns)))
    assert trie.routing().dtype == np.int8
    assert trie.routing(slice(1, 2)).shape == (5, 1, TOP_K)
    turns.steps[1].routing[0] = 200
    (trie,), _ = fold(samples_of(group_of(turns)))
    assert trie.routing().dtype == np.int16 and trie.routing()[2, 0, 0] == 200


# ---------------------------------------------------------------- the type


def test_trie_names_its_nodes_and_sequences():
    (trie,), report = fold(
        samples_of(group_of(trajectory(([A, B], [C, D, D]), ([A, B, D, O], [E]))))
    )
    assert trie.tokens.tolist() == [A, B, C, D, D, O]
    assert trie.node_starts.tolist() == [0, 2, 4]
    assert trie.sequence_starts().tolist() == [0] and trie.branches
    assert trie.sequences == report.sequences_after == 2
    (path,), _ = fold(samples_of(group_of(trajectory(([A, B], [C, D])))))
    assert not path.branches


@pytest.mark.parametrize("kind", ["pack_layout", "on_conflict"])
def test_unknown_choices_are_named(kind):
    with pytest.raises(ValueError, match=r"= other: must be one of"):
        fold([], **{kind: "other"})


def test_folding_nothing_gives_nothing():
    assert fold([])[0] == []
    assert (
        step(0, [A], []).routing is None
        and fold(samples_of(group_of(trajectory(([A], [])))))[0] == []
    )
