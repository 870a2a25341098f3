"""The environment `guess`."""

import asyncio

import pytest

from megastep.envs.guess import Guess


def replies(*texts: str) -> list[str]:
    """The answers to these turns, or `done`."""

    async def run() -> list[str]:
        env = Guess({"secret": 5})
        await env.start()
        outcomes = [await env.step(text, []) for text in texts]
        return [o.observation[0]["content"] if o.observation else "done" for o in outcomes]

    return asyncio.run(run())


def test_comparisons_lead_to_the_number():
    assert replies("guess 3", "guess 7", "guess 5") == ["higher", "lower", "done"]


@pytest.mark.parametrize("text", ["", "guess", "guess x", "guess ²", "guess -1", "guess 999", "5"])
def test_other_texts_are_errors_that_the_model_sees(text):
    assert replies(text) == ["error"]
