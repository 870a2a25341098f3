"""S15: the staleness of trained tokens, from the weight versions that sampled them."""

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


def test_staleness_is_the_number_of_weight_syncs_since_sampling():
    staleness = StalenessTracker()
    for version in (188, 190, 190, 192):  # a sync of the same weights does not count
        staleness.record_sync(version)
    made = group(0, [(188, 2), (190, 1)], [(192, 3)])
    assert staleness.tokens(made) == {2: 2, 1: 1, 0: 3}


def test_untrained_tokens_have_no_staleness():
    made = group(0, [(1, 3)])
    made.trajectories[0].steps[0].loss_mask[0] = False
    assert StalenessTracker([1, 2]).tokens(made) == {1: 2}


def test_a_group_is_dropped_for_its_stalest_token():
    stale = group(0, [(5, 1), (7, 9)])
    fresh = group(1, [(6, 4)])
    kept, dropped = StalenessTracker([5, 6, 7]).drop_stale([stale, fresh], limit=1)
    assert [g.id for g in kept] == [1]
    assert [(d.group, d.reason) for d in dropped] == [(0, "staleness 2, limit 1")]


def test_metrics_report_the_distribution():
    groups = [group(0, [(5, 1), (7, 1)]), group(1, [(7, 2)])]
    metrics = StalenessTracker([5, 6, 7]).metrics(groups, limit=3)
    assert metrics == {
        "staleness/mean": 0.5,
        "staleness/max": 2,
        "staleness/fraction_0": 0.75,
        "staleness/fraction_1": 0.0,
        "staleness/fraction_2": 0.25,
        "staleness/fraction_3": 0.0,
    }
    assert all(meaning_of(name) for name in metrics)
    assert StalenessTracker([5]).metrics([], limit=0) == {}
