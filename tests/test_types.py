"""S16: each violation of a rollout is a line that names the trajectory and the step."""

import ast
from pathlib import Path

import numpy as np
import pytest

import megastep.types
from megastep.errors import RolloutError
from megastep.samples.validation import validate
from megastep.types import Group, LossTable, Step, Trajectory


def step(index=0, last=True, prompt=(1, 2), response=(3, 4), **change):
    made = {
        "prompt_ids": np.array(prompt, np.int32),
        "response_ids": np.array(response, np.int32),
        "loss_mask": np.ones(len(response), bool),
        "logprobs": np.zeros(len(response), np.float32),
        "versions": np.array([[0, len(response)]], np.int32),
    }
    return Step(index, last, **(made | change))


def group(*steps, id=3):
    return Group(id, [Trajectory(id, 0, [step()]), Trajectory(id, 1, list(steps))])


def problems(*groups):
    with pytest.raises(RolloutError) as error:
        validate(list(groups))
    return error.value.problems


def routing(tokens, layers=2, dtype=np.uint8):
    return np.zeros((tokens, layers, 2), dtype)


def test_s16_good_rollouts_pass():
    validate([])
    validate([group(step(last=False), step(1)), group(id=4)])
    validate([group(step(logprobs=None, routing=routing(3)))])
    later = step(
        1, prompt=(1, 2, 3, 4), routing=routing(2), routing_start=3
    )  # what the first has not recorded
    validate([group(step(last=False, routing=routing(3)), later)])
    validate([group(step(response=(), versions=np.zeros((0, 2), np.int32), routing=routing(1)))])
    eos_appended = step(
        response=(3, 4, 9), loss_mask=np.array([True, True, False]), routing=routing(3)
    )
    validate([group(eos_appended)])


WHERE = "group 3, trajectory 1, step 0: "


@pytest.mark.parametrize(
    "change, wanted",
    [
        ({"loss_mask": np.ones(3, bool)}, "loss_mask has 3 entries for 2 response tokens"),
        ({"logprobs": np.zeros(1, np.float32)}, "logprobs has 1 entries for 2 response tokens"),
        ({"logprobs": np.zeros(2)}, "logprobs is float64 with 1 axes; float32 with one is needed"),
        (
            {"prompt_ids": np.array([1, 2])},
            "prompt_ids is int64 with 1 axes; int32 with one is needed",
        ),
        ({"prompt_ids": np.array([1, -1], np.int32)}, "prompt_ids holds the negative id -1"),
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt_ids is empty"),
        ({"versions": np.array([[0, 1]], np.int32)}, "versions cover 1 of 2 response tokens"),
        ({"versions": np.zeros(2, np.int32)}, "versions is int32 [2]"),
        (
            {"finish": "done"},
            "finish is 'done'; one of stop, length, context, abort, error is needed",
        ),
        ({"routing": routing(4)}, "routing ends before token 4; its end must lie in 3 to 3"),
        ({"routing": routing(2)}, "routing ends before token 2; its end must lie in 3 to 3"),
        (
            {"routing": routing(3), "routing_start": 1},
            "routing ends before token 4; its end must lie in 3 to 3",
        ),
        (
            {"routing": routing(0), "routing_start": 3},
            "routing_start is 3; it must lie in 0 to 2, the prompt",
        ),
        (
            {"routing": routing(4), "routing_start": -1},
            "routing_start is -1; it must lie in 0 to 2, the prompt",
        ),
        (
            {"routing": routing(1), "routing_start": 2},
            "experts begin at token 2, and earlier steps have recorded 0",
        ),
        ({"routing": routing(3, dtype=np.int64)}, "routing is int64 with 3 axes"),
        ({"routing": routing(3)[0]}, "routing is uint8 with 2 axes"),
    ],
)
def test_s16_each_violation_in_a_step_names_it(change, wanted):
    (problem,) = problems(group(step(**change)))
    assert problem.startswith(WHERE + wanted)


# ---------------------------------------------------------------- A7: experts that an earlier step has


def two_steps(prompt, start, first=(1, 2), response=(3, 4)):
    """The first recorded experts of its tokens 1 2 3; the second leaves out those of its first `start` tokens."""
    earlier = step(last=False, prompt=first, response=response, routing=routing(3))
    return group(
        earlier,
        step(1, prompt=prompt, routing=routing(len(prompt) + 1 - start), routing_start=start),
    )


@pytest.mark.parametrize(
    "prompt, known",
    [
        ((1, 2, 3, 4, 5), 3),  # the sequence goes on: all but the token that was never forwarded
        ((1, 2, 5, 4, 3), 2),  # rendered anew: the answer differs
        ((1, 9, 3, 4, 5), 1),
        ((9, 2, 3, 4, 5), 0),  # the same tokens behind another one have other experts
    ],
)
def test_a7_experts_are_left_out_as_far_as_tokens_repeat_an_earlier_step(prompt, known):
    validate([two_steps(prompt, known)])
    for start in range(known + 1, len(prompt) + 1):
        (problem,) = problems(two_steps(prompt, start))
        assert problem == (
            f"group 3, trajectory 1, step 1: experts begin at token {start}, and earlier steps have "
            f"recorded {known} tokens of its prompt"
        )


@pytest.mark.parametrize("start, passes", [(2, True), (3, False), (4, False)])
def test_a7_tokens_behind_a_gap_do_not_count(start, passes):
    """The last token of the earlier prompt is gone: what follows is the same, and has other experts."""
    made = two_steps((1, 2, 3, 4, 5), start, first=(1, 2, 9))
    made.trajectories[1].steps[0].routing = routing(4)
    if passes:
        validate([made])
    else:
        assert problems(made)[0].endswith("earlier steps have recorded 2 tokens of its prompt")


def test_a7_any_earlier_step_may_have_them():
    """The third step goes on from the first; the second is another context."""
    first, second = two_steps((7, 8), 0).trajectories[1].steps
    second.last = False
    third = step(2, prompt=(1, 2, 3, 4), routing=routing(2), routing_start=3)
    validate([group(first, second, third)])
    first.routing = None
    (problem,) = problems(group(first, second, third))
    assert "step 2: experts begin at token 3, and earlier steps have recorded 0 tokens" in problem


# ---------------------------------------------------------------- A11: logprobs


def logprobs(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize("value", [5.0, 0.01, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_a11_an_impossible_logprob_of_a_trained_token_is_refused_by_step(value, place):
    values = logprobs(-1, -2)
    values[place] = value
    (problem,) = problems(group(step(logprobs=values)))
    assert problem.startswith(
        WHERE + f"logprobs holds {float(np.float32(value))} for a trained token; finite numbers"
    )


def test_a11_what_is_not_trained_may_have_any():
    for value in (5.0, -np.inf, np.nan):
        validate([group(step(logprobs=logprobs(-1, value), loss_mask=np.array([True, False])))])
    validate([group(step(logprobs=logprobs(0, 1e-6)))])  # rounding
    validate([group(step(logprobs=None))])


def test_s16_steps_must_be_contiguous():
    where = "group 3, trajectory 1: "
    assert problems(group(step(last=False), step(2))) == [
        where + "steps [0, 2] must be contiguous from 0"
    ]
    assert problems(group(step(1))) == [where + "steps [1] must be contiguous from 0"]


@pytest.mark.parametrize(
    "last, said", [((False, False), []), ((True, True), [0, 1]), ((True, False), [0])]
)
def test_s16_the_final_step_and_no_other_is_last(last, said):
    found = problems(group(*[step(i, mark) for i, mark in enumerate(last)]))
    assert found == [
        f"group 3, trajectory 1: steps marked last: {said}; the final one must be, and no other"
    ]


def test_s16_identity_must_be_there_and_agree():
    assert problems(group(step()), group(step())) == ["group 3: appears twice in the batch"]
    assert "id must be from 0" in problems(group(step(), id=-1))[0]
    stray = group(step())
    stray.trajectories[1].group_id = 5
    assert problems(stray) == ["group 3, trajectory 1: group_id is 5"]
    stray.trajectories[1] = Trajectory(3, 0, [step()])
    assert problems(stray) == [
        "group 3: trajectory indices [0, 0] must be distinct and not negative"
    ]


def test_s16_experts_have_one_shape_per_batch():
    mixed = group(step(last=False, routing=routing(3)), step(1, routing=routing(3, layers=4)))
    assert problems(mixed) == [
        "experts: one shape and dtype per batch, found 2 layers × 2 uint8 in group 3, trajectory 1, step 0; "
        "4 layers × 2 uint8 in group 3, trajectory 1, step 1"
    ]


def test_s16_all_violations_are_reported_at_once():
    assert (
        len(
            problems(group(step(finish="?", last=False), step(2, prompt_ids=np.zeros(0, np.int32))))
        )
        == 3
    )


def test_s2_the_reward_of_a_trajectory_is_the_sum_of_its_steps():
    assert Trajectory(0, 0, [step(reward=0.5), step(reward=1.0)]).reward == 1.5
    assert Trajectory(0, 0, []).reward == 0


def test_a2_the_reward_of_a_trajectory_does_not_depend_on_the_order_of_its_steps():
    orders = ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [1e16, 0.5, -1e16], [0.5, 1e16, -1e16])
    totals = [Trajectory(0, 0, [step(reward=r) for r in order]).reward for order in orders]
    assert totals[0] == totals[1] and totals[2] == totals[3] == 0.5


@pytest.mark.parametrize("rewards", [(np.inf, -np.inf), (1e308, 1e308), (np.nan, 1.0)])
def test_rewards_without_a_finite_sum_are_not_an_exception(rewards):
    assert not np.isfinite(Trajectory(0, 0, [step(reward=r) for r in rewards]).reward)


def test_loss_tables_know_where_steps_start():
    ids = lambda *values: np.array(values, np.int32)  # noqa: E731
    nothing = np.zeros(5, np.float32)
    table = LossTable(
        ids(0, 1, 2, 3, 4),
        ids(0, 0, 0, 0, 0),
        nothing,
        nothing,
        nothing,
        ids(0, 0, 0, 0, 1),
        ids(0, 0, 1, 1, 1),
        ids(0, 0, 0, 1, 1),
    )
    assert table.step_starts().tolist() == [0, 2, 3, 4]
    assert (
        table.take(slice(2, 4)).src.tolist() == [2, 3]
        and table.take(slice(2, 4)).old_logprob is None
    )
    assert table.take(slice(0, 0)).step_starts().tolist() == []


def test_types_imports_nothing_of_ours():
    tree = ast.parse(Path(megastep.types.__file__).read_text())
    imported = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    imported += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert set(imported) == {"dataclasses", "enum", "functools", "math", "numpy"}
