"""reasoning_gym: the generated tasks of the `reasoning-gym` library, with tries and feedback.

    env:
      name: reasoning_gym
      options:
        tasks: [chain_sum, leg_counting]     names of its data sets
        config: {chain_sum: {max_terms: 4}}  their settings, by task
        tries: 2                             answers before the episode ends

A row is a `seed`: it chooses one of the tasks and its question, so that all samples of a prompt get
the same one (`data.train: generated`). The answer is the text of `<answer>`, or the whole turn
after the thinking. The reward is the library's score of the last answer, from 0 to 1; `success` is
a score of 1. The library's calls take CPU time, so they run in a thread.
"""

from random import Random
from typing import Any

import numpy as np

from megastep.envs.tags import after_thinking, tagged
from megastep.errors import EnvError
from megastep.rollout.env import Env, Outcome, in_thread
from megastep.text import one_line

INSTRUCTIONS = "{question}\n\nWrite only the final answer between <answer> and </answer>."
FEEDBACK = "That is not right. Try again."


class ReasoningGym(Env):
    columns = {"seed": int}

    def __init__(
        self,
        row: dict[str, Any],
        *,
        tasks: list[str],
        config: dict[str, dict[str, Any]] | None = None,
        tries: int = 1,
    ):
        if not isinstance(tasks, list) or not tasks:
            raise EnvError(f"env.options.tasks = {tasks}: a list of task names is needed")
        self.seed = row["seed"]
        self.task = tasks[self.seed % len(tasks)]
        self.settings = (config or {}).get(self.task, {})
        self.tries_left = tries
        self.tasks: Any = None  # the data set of one question
        self.entry: dict[str, Any] = {}

    @classmethod
    def generate(cls, random: Random) -> dict[str, Any]:
        return {"seed": random.getrandbits(31)}

    async def start(self):
        await in_thread(self._start)
        question = INSTRUCTIONS.format(question=self.entry["question"])
        return [{"role": "user", "content": question}]

    def _start(self) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.task not in DATASETS:
            raise EnvError(
                f"env.options.tasks: {self.task} is no data set of reasoning_gym; "
                f"it has {', '.join(sorted(DATASETS))}"
            )
        try:
            self.tasks = reasoning_gym.create_dataset(
                self.task, size=1, seed=self.seed, **self.settings
            )
        except (TypeError, AssertionError) as error:  # an unknown setting, or a wrong value
            raise EnvError(f"env.options.config.{self.task}: {one_line(error)}") from None
        self.entry = self.tasks[0]

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        turn = after_thinking(text)
        answer = tagged(turn, "answer")
        if answer is None:
            answer = turn.strip()
        score = float(await in_thread(self.tasks.score_answer, answer, self.entry))
        self.tries_left -= 1
        metrics = {"success": score == 1, "score": score}
        if score == 1 or self.tries_left <= 0:
            return Outcome(reward=score, done=True, metrics=metrics)
        return Outcome([{"role": "user", "content": FEEDBACK}], metrics=metrics)
