"""S16: each violation of the data model is one line that names the trajectory and the step."""

import numpy as np
import pytest

from megastep.errors import RolloutError
from megastep.samples.validation import validate
from megastep.types import Group, Step, Trajectory


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


def test_s16_valid_rollouts_pass():
    validate([])
    validate([group(step(last=False), step(1)), group(id=4)])
    validate([group(step(logprobs=None, routing=routing(3)))])
    # The later step records what the first one did not.
    later = step(1, prompt=(1, 2, 3, 4), routing=routing(2), routing_start=3)
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
            "routing begins at token 2, but earlier steps recorded 0",
        ),
        ({"routing": routing(3, dtype=np.int64)}, "routing is int64 with 3 axes"),
        ({"routing": routing(3)[0]}, "routing is uint8 with 2 axes"),
    ],
)
def test_s16_each_violation_in_a_step_names_it(change, wanted):
    (problem,) = problems(group(step(**change)))
    assert problem.startswith(WHERE + wanted)


# ---------------------------------------------------------------- A7: routing of earlier steps


def two_steps(prompt, start, first=(1, 2), response=(3, 4)):
    """The first step recorded the routing of 1 2 3; the second leaves out its first `start`."""
    earlier = step(last=False, prompt=first, response=response, routing=routing(3))
    return group(
        earlier,
        step(1, prompt=prompt, routing=routing(len(prompt) + 1 - start), routing_start=start),
    )


@pytest.mark.parametrize(
    "prompt, recorded",
    [
        ((1, 2, 3, 4, 5), 3),  # the sequence continues; token 4 was never forwarded
        ((1, 2, 5, 4, 3), 2),  # rendered again: the response differs
        ((1, 9, 3, 4, 5), 1),
        ((9, 2, 3, 4, 5), 0),  # routing depends on the tokens before
    ],
)
def test_a7_routing_may_be_left_out_for_tokens_that_repeat_an_earlier_step(prompt, recorded):
    validate([two_steps(prompt, recorded)])
    for start in range(recorded + 1, len(prompt) + 1):
        (problem,) = problems(two_steps(prompt, start))
        assert problem == (
            f"group 3, trajectory 1, step 1: routing begins at token {start}, but earlier steps "
            f"recorded {recorded} tokens of its prompt"
        )


@pytest.mark.parametrize("start, passes", [(2, True), (3, False), (4, False)])
def test_a7_tokens_after_a_difference_do_not_count(start, passes):
    """The new prompt lacks a token of the earlier one: equal tokens after it route differently."""
    made = two_steps((1, 2, 3, 4, 5), start, first=(1, 2, 9))
    made.trajectories[1].steps[0].routing = routing(4)
    if passes:
        validate([made])
    else:
        assert problems(made)[0].endswith("earlier steps recorded 2 tokens of its prompt")


def test_a7_any_earlier_step_may_have_recorded_the_routing():
    """The third step continues the first; the second is another context."""
    first, second = two_steps((7, 8), 0).trajectories[1].steps
    second.last = False
    third = step(2, prompt=(1, 2, 3, 4), routing=routing(2), routing_start=3)
    validate([group(first, second, third)])
    first.routing = None
    (problem,) = problems(group(first, second, third))
    assert "step 2: routing begins at token 3, but earlier steps recorded 0 tokens" in problem


# ---------------------------------------------------------------- A11: logprobs


def logprobs(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize("value", [5.0, 0.01, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_a11_an_invalid_logprob_of_a_trained_token_is_reported_with_its_step(value, place):
    values = logprobs(-1, -2)
    values[place] = value
    (problem,) = problems(group(step(logprobs=values)))
    assert problem.startswith(
        WHERE + f"logprobs holds {float(np.float32(value))} for a trained token; finite numbers"
    )


def test_a11_untrained_tokens_may_have_any_logprob():
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
    "last, marked", [((False, False), []), ((True, True), [0, 1]), ((True, False), [0])]
)
def test_s16_only_the_final_step_is_marked_last(last, marked):
    found = problems(group(*[step(i, mark) for i, mark in enumerate(last)]))
    assert found == [
        f"group 3, trajectory 1: steps marked last: {marked}; the final one must be, and no other"
    ]


def test_s16_ids_must_be_valid_unique_and_consistent():
    assert problems(group(step()), group(step())) == ["group 3: appears twice in the batch"]
    assert "id must be from 0" in problems(group(step(), id=-1))[0]
    stray = group(step())
    stray.trajectories[1].group_id = 5
    assert problems(stray) == ["group 3, trajectory 1: group_id is 5"]
    stray.trajectories[1] = Trajectory(3, 0, [step()])
    assert problems(stray) == [
        "group 3: trajectory indices [0, 0] must be distinct and not negative"
    ]


def test_s16_routing_has_one_shape_per_batch():
    mixed = group(step(last=False, routing=routing(3)), step(1, routing=routing(3, layers=4)))
    assert problems(mixed) == [
        "routing: one shape and dtype per batch, found "
        "2 layers × 2 uint8 in group 3, trajectory 1, step 0; "
        "4 layers × 2 uint8 in group 3, trajectory 1, step 1"
    ]


def test_s16_all_violations_are_reported_at_once():
    no_prompt = step(2, prompt_ids=np.zeros(0, np.int32))
    assert len(problems(group(step(finish="?", last=False), no_prompt))) == 3
