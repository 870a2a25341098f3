"""X10: games of the textarena library, as they are."""

import asyncio
import random

import numpy as np
import pytest

from megastep.envs.textarena import TextArena
from megastep.errors import EnvError
from megastep.rollout.env import find_env

pytest.importorskip("textarena", reason="launch/requirements-adapters.txt is not installed")

NO_IDS = np.array([], np.int32)
GUESS = "GuessTheNumber-v0"


async def run_episode(env, *texts):
    messages = await env.start()
    outcomes = []
    for text in texts:
        outcomes.append(await env.step(text, NO_IDS))
        if outcomes[-1].done:
            break
    await env.close()
    return messages, outcomes


def guesses(seed: int) -> tuple[list[str], float]:
    """Bisect: the game's messages, and its reward."""

    async def run():
        env = TextArena({"seed": seed}, game=GUESS)
        messages = await env.start()
        seen = [messages[0]["content"]]
        low, high = 1, 20
        while True:
            guess = (low + high) // 2
            outcome = await env.step(f"<think>[3]</think>I say [{guess}]", NO_IDS)
            if outcome.done:
                return seen, outcome.reward
            seen.append(outcome.observation[0]["content"])
            if "higher" in seen[-1]:
                low = guess + 1
            else:
                high = guess - 1

    return asyncio.run(run())


def test_x10_a_game_is_won():
    seen, reward = guesses(seed=7)
    assert "between 1 and 20" in seen[0]
    assert all("higher" in text or "lower" in text for text in seen[1:])
    assert reward == 1


def test_x10_the_model_sees_only_what_is_new():
    """Its own moves are in the history already, and so are earlier messages."""
    seen, _ = guesses(seed=7)
    assert len(seen) > 2
    assert all("I say" not in text and "between 1 and 20" not in text for text in seen[1:])


def test_x10_the_seed_decides_the_game():
    assert guesses(3) == guesses(3)
    assert len({tuple(guesses(seed)[0]) for seed in range(6)}) > 1


def test_x10_games_do_not_disturb_each_other():
    """The library's generators are global: a game must not depend on others that run."""

    def frames(together: bool) -> list[str]:
        async def run():
            game = dict(game="Bandit-v0")
            one = TextArena({"seed": 1}, **game)
            other = TextArena({"seed": 2}, **game)
            first, _ = await one.start(), await other.start()
            seen = [first[0]["content"]]
            for _ in range(6):
                if together:
                    await other.step("[red]", NO_IDS)
                    random.random()
                    np.random.rand()
                outcome = await one.step("[red]", NO_IDS)
                seen.append(str(outcome.observation))
            return seen

        return asyncio.run(run())

    assert frames(together=True) == frames(together=False)


def test_x10_other_generators_are_left_as_they_were():
    random.seed(5)
    np.random.seed(5)
    expected = random.Random(5).random(), np.random.RandomState(5).rand()
    guesses(seed=7)
    assert (random.random(), np.random.rand()) == expected


def test_x10_settings_of_a_game_reach_it():
    """env.options.config"""
    env = TextArena({"seed": 1}, game=GUESS, config={"min_number": 5, "max_number": 6})
    messages, _ = asyncio.run(run_episode(env))
    assert "between 5 and 6" in messages[0]["content"]


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"game": "Nothing-v0"}, "env.options.game = Nothing-v0: .*not found"),
        ({"game": "TicTacToe-v0"}, "TicTacToe-v0: not a game for one player .*has to be 2"),
        ({"game": GUESS, "config": {"wrong": 1}}, "env.options.config: .*wrong"),
    ],
)
def test_x10_a_mistake_is_named(options, problem):
    with pytest.raises(EnvError, match=problem):
        asyncio.run(run_episode(TextArena({"seed": 1}, **options)))


def test_x10_it_is_built_in():
    assert find_env("textarena") is TextArena
