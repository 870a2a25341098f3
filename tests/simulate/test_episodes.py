"""X8: episodes from distributions and from rollout files."""

import numpy as np
import pytest

from megastep.config import load
from megastep.errors import ConfigError
from megastep.simulate.episodes import Distribution, Distributions, Episode, Recorded, Turn
from megastep.types import Group
from tests.samples.rollouts import trajectory


def drawn(text: str, count: int = 20_000) -> np.ndarray:
    random = np.random.default_rng(0)
    distribution = Distribution.parse(text)
    return np.array([distribution.draw(random) for _ in range(count)])


def test_a_number_is_constant():
    assert set(drawn("7", 10)) == {7.0}


def test_a_range_is_uniform():
    values = drawn("2..6")
    assert values.min() >= 2 and values.max() <= 6
    assert values.mean() == pytest.approx(4, rel=0.02)


def test_a_mean_and_a_percentile_are_a_log_normal():
    values = drawn("0.5~5")
    assert values.mean() == pytest.approx(0.5, rel=0.1)
    assert np.percentile(values, 99) == pytest.approx(5, rel=0.15)


@pytest.mark.parametrize(
    "text", ["", "x", "1..", "..2", "5..1", "1~2~3", "2~1", "1~1e6", "-1", "nan", "inf", "1e12"]
)
def test_anything_else_is_one_line(text):
    with pytest.raises(ConfigError) as error:
        Distribution.parse(text)
    assert len(error.value.problems) == 1 and "\n" not in str(error.value)


def config(*overrides: str):
    return load("configs/chase.yaml", overrides)


def test_episodes_respect_the_limits_of_the_config():
    """As rollout/agent.py: 5 turns, prompts up to 120, responses up to 9 tokens."""
    given = {
        "turns": "1..20",
        "prompt-tokens": "1..40",
        "response-tokens": "1..50",
        "observation-tokens": "1..60",
    }
    episodes = Distributions.of(config(), given)
    found = [episodes.episode(prompt, index) for prompt in range(50) for index in range(4)]
    assert len({len(episode.turns) for episode in found}) > 1
    assert max(turn.response_tokens for episode in found for turn in episode.turns) == 9
    assert max(turn.prompt_tokens for episode in found for turn in episode.turns) <= 120


def test_an_episode_has_at_most_max_turns():
    short = {"turns": "20", "prompt-tokens": "1", "observation-tokens": "1", "response-tokens": "1"}
    assert len(Distributions.of(config(), short).episode(0, 0).turns) == 5


def test_a_turn_extends_the_one_before():
    episode = Distributions.of(config(), {"turns": "3"}).episode(0, 0)
    for before, turn in zip(episode.turns, episode.turns[1:]):
        assert turn.shared_tokens == before.prompt_tokens + before.response_tokens


def test_samples_share_their_prompt_and_nothing_else():
    episodes = Distributions.of(
        config(), {"prompt-tokens": "1..20", "observation-tokens": "5", "turns": "1..5"}
    )
    of_prompt = [episodes.episode(3, index) for index in range(8)]
    assert len({episode.turns[0].new_tokens for episode in of_prompt}) == 1
    assert len({len(episode.turns) for episode in of_prompt}) > 1
    assert episodes.episode(3, 0) == of_prompt[0]


def test_every_wrong_option_is_named():
    with pytest.raises(ConfigError) as error:
        Distributions.of(config(), {"turns": "0", "env-seconds": "soon"})
    assert [line.split()[0] for line in error.value.problems] == ["--turns", "--env-seconds"]


def test_recorded_episodes_have_the_lengths_of_the_file():
    """The second prompt repeats [1 2 5], of the prompt and the response before."""
    group = Group(0, [trajectory(([1, 2], [5, 6]), ([1, 2, 5, 7, 8], [9]), rewards=[0.0, 2.0])])
    recorded = Recorded([group], "file", Distribution.parse("3"), seed=0)
    expected = Episode([Turn(0, 2, 2, 3.0), Turn(3, 2, 1, 3.0)], reward=2.0)
    assert recorded.episode(0, 0) == expected
    assert recorded.episode(17, 5) == expected  # other prompts and samples take them in turn
