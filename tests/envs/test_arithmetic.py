"""The environment `arithmetic`."""

import asyncio
from random import Random

import pytest

from megastep.envs.arithmetic import Arithmetic, calculate, evaluate
from megastep.errors import EnvError


def outcomes(expression: str, *texts: str) -> list:
    async def run() -> list:
        env = Arithmetic({"expression": expression})
        await env.start()
        return [await env.step(text, []) for text in texts]

    return asyncio.run(run())


def test_a_call_returns_the_value_and_the_answer_ends_the_episode():
    call, answer = outcomes("371 * 48 + 291", "<calc>371 * 48 + 291</calc>", "The answer is 18099.")
    assert call.observation == [{"role": "user", "content": "18099"}]
    assert (call.reward, call.done, call.metrics) == (0, False, {"success": False, "calls": 1})
    assert (answer.reward, answer.done, answer.metrics) == (1, True, {"success": True, "calls": 1})


@pytest.mark.parametrize(
    "text", ["18099", "The answer is 18098.", "The answer is", "The answer is 18099 or 18098.", ""]
)
def test_other_turns_end_the_episode_without_reward(text):
    (ended,) = outcomes("371 * 48 + 291", text)
    assert (ended.reward, ended.done, ended.metrics["success"]) == (0, True, False)


def test_the_question_is_the_last_message_and_not_the_example():
    env = Arithmetic({"expression": "12 * 34 - 56"})
    messages = asyncio.run(env.start())
    assert messages[-1] == {"role": "user", "content": "12 * 34 - 56 = ?"}
    assert "12 * 34" not in str(messages[:-1])


def test_generated_rows_can_be_computed():
    for i in range(50):
        row = Arithmetic.generate(Random(i))
        assert calculate(row["expression"]) == str(eval(row["expression"]))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2*(3+4)", "14"), ("-5 + 2", "-3"), ("1/2", "0.5"), ("10/3", "3.333333"), ("6/3", "2")],
)
def test_values_as_they_are_written(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 +",
        "1/0",
        "9**9",
        "x",
        "__import__('os')",
        "True",
        "1e308*10",
        "1 if 2 else 3",
        "(" * 60,
        "1+" * 60 + "1",
        "'a'*3",
        "3j",
        "\0",
        "1,2",
    ],
)
def test_other_texts_are_errors_that_the_model_sees(expression):
    assert calculate(expression).startswith("error: ")
    with pytest.raises(ValueError):
        evaluate(expression)


def test_an_expression_of_the_data_set_that_cannot_be_computed_is_an_error_of_the_data():
    with pytest.raises(EnvError, match="expression = 2 \\*\\* 3"):
        outcomes("2 ** 3", "The answer is 8.")
