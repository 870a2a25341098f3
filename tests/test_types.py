"""The records of megastep/types.py."""

import ast
from pathlib import Path

import numpy as np
import pytest

import megastep.types
from megastep.types import LossTable, Step, Trajectory


def step(reward):
    return Step(
        index=0,
        last=True,
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([3, 4], np.int32),
        loss_mask=np.ones(2, bool),
        logprobs=np.zeros(2, np.float32),
        versions=np.array([[0, 2]], np.int32),
        reward=reward,
    )


def test_s2_the_reward_of_a_trajectory_is_the_sum_of_its_steps():
    assert Trajectory(0, 0, [step(reward=0.5), step(reward=1.0)]).reward == 1.5
    assert Trajectory(0, 0, []).reward == 0


def test_a2_the_reward_of_a_trajectory_does_not_depend_on_the_order_of_its_steps():
    orders = ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [1e16, 0.5, -1e16], [0.5, 1e16, -1e16])
    totals = [Trajectory(0, 0, [step(reward=r) for r in order]).reward for order in orders]
    assert totals[0] == totals[1] and totals[2] == totals[3] == 0.5


@pytest.mark.parametrize("rewards", [(np.inf, -np.inf), (1e308, 1e308), (np.nan, 1.0)])
def test_rewards_without_a_finite_sum_do_not_raise(rewards):
    assert not np.isfinite(Trajectory(0, 0, [step(reward=r) for r in rewards]).reward)


def test_step_starts_of_a_loss_table():
    def ids(*values):
        return np.array(values, np.int32)

    zeros = np.zeros(5, np.float32)
    table = LossTable(
        src=ids(0, 1, 2, 3, 4),
        target=ids(0, 0, 0, 0, 0),
        advantage=zeros,
        weight=zeros,
        rollout_logprob=zeros,
        group=ids(0, 0, 0, 0, 1),
        trajectory=ids(0, 0, 1, 1, 1),
        step=ids(0, 0, 0, 1, 1),
    )
    assert table.step_starts().tolist() == [0, 2, 3, 4]
    taken = table.take(slice(2, 4))
    assert taken.src.tolist() == [2, 3]
    assert taken.old_logprob is None
    assert table.take(slice(0, 0)).step_starts().tolist() == []


def test_types_imports_no_module_of_megastep():
    tree = ast.parse(Path(megastep.types.__file__).read_text())
    imported = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    imported += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert set(imported) == {"dataclasses", "enum", "functools", "math", "numpy"}
