"""guess: find a number by comparisons. The same vocabulary of 64 words as `chase`.

    <bos> <user> guess between 0 and 15 <eot> <asst>
    <think> 0 15 </think> guess 7 <eot>
    ... <asst> guess 7 <eot> <tool> higher <eot> <asst>

Reward 1 for the number, at any of the `rollout.max_turns` turns. The state of a turn is the
remaining interval, so that step-aware estimators can compare turns of different histories. Column
of a data set, unless rows are generated: `secret`.
"""

from random import Random
from typing import Any

import numpy as np

from megastep.envs.tags import after_thinking
from megastep.rollout.env import Env, Outcome

NUMBERS = 16


class Guess(Env):
    columns = {"secret": int}

    def __init__(self, row: dict[str, Any], *, numbers: int = NUMBERS):
        self.secret = row["secret"]
        self.numbers = numbers
        self.low = 0
        self.high = numbers - 1

    @classmethod
    def generate(cls, random: Random) -> dict[str, Any]:
        return {"secret": random.randrange(NUMBERS)}

    async def start(self):
        return [{"role": "user", "content": f"guess between 0 and {self.numbers - 1}"}]

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        number = self._parse(text)
        if number is None:
            return self._reply("error")
        if number == self.secret:
            return Outcome(reward=1.0, done=True, metrics={"success": True})
        if number < self.secret:
            self.low = max(self.low, number + 1)
            return self._reply("higher")
        self.high = min(self.high, number - 1)
        return self._reply("lower")

    def _parse(self, text: str) -> int | None:
        match after_thinking(text).split():
            case ["guess", digits] if digits.isdecimal() and int(digits) < self.numbers:
                return int(digits)
        return None

    def _reply(self, word: str) -> Outcome:
        state = self.low * self.numbers + self.high
        return Outcome([{"role": "tool", "content": word}], metrics={"success": False}, state=state)
