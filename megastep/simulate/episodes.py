"""Episodes without text: how many turns, how many tokens, how long the environment takes.

Distributions   drawn from distributions; N, LOW..HIGH (uniform) or MEAN~P99 (log-normal with
                this mean and this 99th percentile)
Recorded        those of a rollout file, with their rewards
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megastep.config import Config
from megastep.errors import ConfigError
from megastep.models.architecture import read_architecture
from megastep.types import Group

P99 = 2.326  # standard deviations of the 99th percentile of a normal distribution
SUCCESS = 0.5  # of drawn episodes: filters for degenerate groups need rewards


@dataclass(frozen=True)
class Turn:
    shared_tokens: int  # of the prompt, in the sequence of the turn before; 0 in the first turn
    new_tokens: int  # of the prompt
    response_tokens: int
    env_s: float  # of the environment, after the response

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + self.new_tokens


@dataclass(frozen=True)
class Episode:
    turns: list[Turn]
    reward: float


class Episodes(Protocol):
    def episode(self, prompt: int, index: int) -> Episode: ...

    def describe(self) -> str: ...


# ---------------------------------------------------------------- distributions


@dataclass(frozen=True)
class Distribution:
    text: str
    draw: Callable[[np.random.Generator], float]

    @classmethod
    def parse(cls, text: str, least: float = 0.0) -> "Distribution":
        """ConfigError for anything but N, LOW..HIGH and MEAN~P99, none below `least`."""
        if ".." in text:
            low, high = _numbers(text, "..", least)
            if low <= high:
                return cls(text, lambda random: float(random.uniform(low, high)))
        elif "~" in text:
            mean, p99 = _numbers(text, "~", least)
            # exp(m + s²/2) = mean and exp(m + P99 s) = p99, which has a solution up to this ratio.
            if 0 < mean <= p99 <= mean * math.exp(P99**2 / 2):
                s = P99 - math.sqrt(P99**2 - 2 * math.log(p99 / mean))
                m = math.log(mean) - s**2 / 2
                return cls(text, lambda random: float(random.lognormal(m, s)))
            raise ConfigError(
                f"{text[:60]}: MEAN~P99 needs 0 < MEAN <= P99 <= {math.exp(P99**2 / 2):.3g} × MEAN"
            )
        else:
            (value,) = _numbers(text, None, least)
            return cls(text, lambda random: value)
        raise ConfigError(f"{text[:60]}: LOW..HIGH needs LOW <= HIGH")


def _numbers(text: str, separator: str | None, least: float) -> list[float]:
    parts = text.split(separator) if separator else [text]
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    count = 2 if separator else 1
    if len(numbers) != count or not all(least <= number <= 1e9 for number in numbers):
        raise ConfigError(
            f"{text[:60]}: not a distribution; N, LOW..HIGH or MEAN~P99 is needed, "
            f"numbers from {least:g} to 1e9"
        )
    return numbers


@dataclass(frozen=True)
class Distributions:
    turns: Distribution
    prompt_tokens: Distribution
    response_tokens: Distribution
    observation_tokens: Distribution
    env_s: Distribution
    max_turns: int
    max_prompt_tokens: int
    max_response_tokens: int
    seed: int

    @classmethod
    def of(cls, config: Config, given: dict[str, str | None]) -> "Distributions":
        """given: by option, None where a default applies."""
        response = config.rollout.max_response_tokens
        limit = config.prompt_tokens(read_architecture(config.model.path))
        defaults = {
            "turns": f"1..{config.rollout.max_turns}",
            "prompt-tokens": f"{min(1000, limit // 2)}",
            "response-tokens": f"{max(response // 4, 1)}~{response}",
            "observation-tokens": f"{min(500, limit // 4)}",
            "env-seconds": "0.5~2",
        }
        least = {"turns": 1.0, "prompt-tokens": 1.0, "response-tokens": 1.0}
        found: dict[str, Distribution] = {}
        problems = []
        for name, default in defaults.items():
            try:
                found[name] = Distribution.parse(given.get(name) or default, least.get(name, 0.0))
            except ConfigError as error:
                problems.append(f"--{name} {error}")
        if problems:
            raise ConfigError(problems)
        return cls(
            turns=found["turns"],
            prompt_tokens=found["prompt-tokens"],
            response_tokens=found["response-tokens"],
            observation_tokens=found["observation-tokens"],
            env_s=found["env-seconds"],
            max_turns=config.rollout.max_turns,
            max_prompt_tokens=limit,
            max_response_tokens=response,
            seed=config.train.seed,
        )

    def episode(self, prompt: int, index: int) -> Episode:
        """The limits end episodes and responses as in rollout/agent.py."""
        of_prompt = np.random.default_rng([self.seed, prompt])
        random = np.random.default_rng([self.seed, prompt, index])
        new_tokens = max(round(self.prompt_tokens.draw(of_prompt)), 1)
        new_tokens = min(new_tokens, self.max_prompt_tokens)
        count = min(max(round(self.turns.draw(random)), 1), self.max_turns)
        turns: list[Turn] = []
        shared = 0
        while len(turns) < count and shared + new_tokens <= self.max_prompt_tokens:
            drawn = max(round(self.response_tokens.draw(random)), 1)
            response = min(drawn, self.max_response_tokens)
            turns.append(Turn(shared, new_tokens, response, self.env_s.draw(random)))
            shared += new_tokens + response
            new_tokens = max(round(self.observation_tokens.draw(random)), 1)
        return Episode(turns, float(random.random() < SUCCESS))

    def describe(self) -> str:
        return (
            f"turns {self.turns.text}, prompt {self.prompt_tokens.text}, "
            f"response {self.response_tokens.text}, observation {self.observation_tokens.text} "
            f"tokens, environment {self.env_s.text} s"
        )


# ---------------------------------------------------------------- recorded


@dataclass(frozen=True)
class Recorded:
    """Prompt p is group p of the file, modulo their number."""

    groups: list[Group]
    name: str
    env_s: Distribution
    seed: int
    cache: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict)

    def episode(self, prompt: int, index: int) -> Episode:
        place = prompt % len(self.groups)
        trajectories = self.groups[place].trajectories
        trajectory = trajectories[index % len(trajectories)]
        key = (place, index % len(trajectories))
        if key not in self.cache:
            self.cache[key] = _lengths(trajectory.steps)
        random = np.random.default_rng([self.seed, prompt, index])
        turns = [Turn(*lengths, self.env_s.draw(random)) for lengths in self.cache[key]]
        return Episode(turns, trajectory.reward)

    def describe(self) -> str:
        return f"{len(self.groups)} groups of {self.name}, environment {self.env_s.text} s"


def _lengths(steps: list) -> list[tuple[int, int, int]]:
    """Shared, new and response tokens of each step."""
    from megastep.samples.prefix import common_prefix

    lengths = []
    before = np.empty(0, np.int32)
    for step in steps:
        prompt_ids = step.prompt_ids
        shared = int(common_prefix(before, prompt_ids))
        lengths.append((shared, len(prompt_ids) - shared, len(step.response_ids)))
        before = np.concatenate([prompt_ids, step.response_ids])
    return lengths
