"""guess: find a number by asking. The same 64 words as `chase`.

    <bos> <user> guess between 0 and 15 <eot> <asst>
    <think> 0 15 </think> guess 7 <eot>
    ... <asst> guess 7 <eot> <tool> higher <eot> <asst>

Reward 1 for naming the number, at any turn; `rollout.max_turns` sets how many there are. The state of a turn is the
interval still open, so that step-aware estimators can compare turns of different histories. Column of the data set,
where episodes are not generated: `secret`.
"""

from random import Random
from typing import Any

import numpy as np

from megastep.rollout.env import Env, Outcome

NUMBERS = 16


class Guess(Env):
    columns = {"secret": int}

    def __init__(self, row: dict[str, Any], *, numbers: int = NUMBERS):
        self.secret, self.numbers = row["secret"], numbers
        self.low, self.high = 0, numbers - 1

    @classmethod
    def generate(cls, random: Random) -> dict[str, Any]:
        return {"secret": random.randrange(NUMBERS)}

    async def start(self):
        return [{"role": "user", "content": f"guess between 0 and {self.numbers - 1}"}]

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        words = text.rpartition("</think>")[2].split()
        if (
            len(words) != 2
            or words[0] != "guess"
            or not words[1].isdigit()
            or int(words[1]) >= self.numbers
        ):
            return self._answer("error")
        number = int(words[1])
        if number == self.secret:
            return Outcome(reward=1.0, done=True, metrics={"success": True})
        if number < self.secret:
            self.low = max(self.low, number + 1)
            return self._answer("higher")
        self.high = min(self.high, number - 1)
        return self._answer("lower")

    def _answer(self, word: str) -> Outcome:
        state = self.low * self.numbers + self.high
        return Outcome([{"role": "tool", "content": word}], metrics={"success": False}, state=state)
