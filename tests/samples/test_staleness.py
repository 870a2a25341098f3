"""S15: the age of trained tokens, from the versions that sampled them."""

import numpy as np

from megastep.samples.staleness import Ages
from megastep.types import Group, Step, Trajectory
from megastep.report.meanings import meaning_of


def group(id: int, *versions: list) -> Group:
    """One step per entry: rows (version, tokens)."""
    steps = []
    for index, rows in enumerate(versions):
        tokens = sum(n for _, n in rows)
        steps.append(Step(
            index=index, last=index == len(versions) - 1, prompt_ids=np.zeros(1, np.int32),
            response_ids=np.zeros(tokens, np.int32), loss_mask=np.ones(tokens, bool),
            logprobs=np.zeros(tokens, np.float32), versions=np.array(rows, np.int32),
        ))
    return Group(id, [Trajectory(id, 0, steps)])


def test_age_is_the_number_of_policies_since():
    ages = Ages()
    for version in (188, 190, 190, 192):  # the same weights again are no other policy
        ages.push(version)
    assert ages.of(group(0, [(188, 2), (190, 1)], [(192, 3)])).tolist() == [2, 2, 1, 0, 0, 0]


def test_an_untrained_token_has_no_age():
    made = group(0, [(1, 3)])
    made.trajectories[0].steps[0].loss_mask[0] = False
    assert len(Ages([1, 2]).of(made)) == 2


def test_what_is_too_old_is_refused_by_its_oldest_token():
    old, new = group(0, [(5, 1), (7, 9)]), group(1, [(6, 4)])
    kept, dropped = Ages([5, 6, 7]).refuse_old([old, new], limit=1)
    assert [g.id for g in kept] == [1]
    assert [(d.group, d.reason) for d in dropped] == [(0, "2 versions old")]


def test_the_distribution_is_a_metric():
    metrics = Ages([5, 6, 7]).metrics([group(0, [(5, 1), (7, 1)]), group(1, [(7, 2)])], limit=3)
    assert metrics == {"age/mean": 0.5, "age/max": 2, "age/share_0": 0.75, "age/share_1": 0.0, "age/share_2": 0.25,
                       "age/share_3": 0.0}
    assert all(meaning_of(name) for name in metrics) and Ages([5]).metrics([], limit=0) == {}
