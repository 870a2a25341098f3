"""S15: the age of trained tokens, from the versions that sampled them."""

import numpy as np

from megastep.report.meanings import meaning_of
from megastep.samples.staleness import StalenessTracker
from megastep.types import Group, Step, Trajectory


def group(id: int, *versions: list) -> Group:
    """One step per entry: rows (version, tokens)."""
    steps = []
    for index, rows in enumerate(versions):
        tokens = sum(n for _, n in rows)
        steps.append(
            Step(
                index=index,
                last=index == len(versions) - 1,
                prompt_ids=np.zeros(1, np.int32),
                response_ids=np.zeros(tokens, np.int32),
                loss_mask=np.ones(tokens, bool),
                logprobs=np.zeros(tokens, np.float32),
                versions=np.array(rows, np.int32),
            )
        )
    return Group(id, [Trajectory(id, 0, steps)])


def test_age_is_the_number_of_policies_since():
    staleness = StalenessTracker()
    for version in (188, 190, 190, 192):  # the same weights again are no other policy
        staleness.record_sync(version)
    assert staleness.per_token(group(0, [(188, 2), (190, 1)], [(192, 3)])).tolist() == [
        2,
        2,
        1,
        0,
        0,
        0,
    ]


def test_an_untrained_token_has_no_age():
    made = group(0, [(1, 3)])
    made.trajectories[0].steps[0].loss_mask[0] = False
    assert len(StalenessTracker([1, 2]).per_token(made)) == 2


def test_what_is_too_old_is_refused_by_its_oldest_token():
    old, new = group(0, [(5, 1), (7, 9)]), group(1, [(6, 4)])
    kept, dropped = StalenessTracker([5, 6, 7]).drop_stale([old, new], limit=1)
    assert [g.id for g in kept] == [1]
    assert [(d.group, d.reason) for d in dropped] == [(0, "staleness 2, limit 1")]


def test_the_distribution_is_a_metric():
    metrics = StalenessTracker([5, 6, 7]).metrics(
        [group(0, [(5, 1), (7, 1)]), group(1, [(7, 2)])], limit=3
    )
    assert metrics == {
        "staleness/mean": 0.5,
        "staleness/max": 2,
        "staleness/fraction_0": 0.75,
        "staleness/fraction_1": 0.0,
        "staleness/fraction_2": 0.25,
        "staleness/fraction_3": 0.0,
    }
    assert (
        all(meaning_of(name) for name in metrics)
        and StalenessTracker([5]).metrics([], limit=0) == {}
    )
