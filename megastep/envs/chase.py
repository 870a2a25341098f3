"""chase: follow a hidden table with a lookup tool and a scratchpad.

    <bos> <user> hops 2 from 7 <eot> <asst>                   the question
    <think> 2 7 </think> call 7 <eot>                         scratchpad: hops left, current key
    ... <asst> call 7 <eot> <tool> 12 <eot> <asst>            turn 2: the template dropped it
    <think> 1 12 </think> call 12 <eot>
    ... <asst> call 12 <eot> <tool> 3 <eot> <asst>
    <think> 0 3 </think> answer 3 <eot>

`call k` returns table[k], `answer k` ends the episode, anything else returns `error`. Reward 1 for
the right answer. `rollout.max_turns` ends an episode without an answer; the task needs at most 5.

Columns of a data set, unless rows are generated: `table` (a permutation of 0, 1, ...), `hops`,
`key`.

A tiny model does not find the solution by exploration. `demonstrations` returns episodes of a lazy
expert, whose scratchpad is right but who usually answers too early: after a supervised warm start
on them, RL has to unlearn the early answers.
"""

from random import Random
from typing import Any

import numpy as np

from megastep.envs.tags import after_thinking
from megastep.rollout.conversations import demonstration
from megastep.rollout.env import Env, Outcome
from megastep.rollout.renderer import Renderer
from megastep.types import Group

KEYS = 16
MAX_HOPS = 3
DILIGENCE = 0.4  # probability that the lazy expert looks up the next hop


class Chase(Env):
    columns = {"table": list, "hops": int, "key": int}

    def __init__(self, row: dict[str, Any]):
        self.table = row["table"]
        self.hops = row["hops"]
        self.key = row["key"]

    @classmethod
    def generate(cls, random: Random) -> dict[str, Any]:
        table = random.sample(range(KEYS), KEYS)
        return {"table": table, "hops": random.randint(1, MAX_HOPS), "key": random.randrange(KEYS)}

    @classmethod
    def demonstrations(cls, count: int, seed: int, renderer: Renderer) -> list[Group]:
        return demonstrations(count, seed, renderer)

    async def start(self):
        return [{"role": "user", "content": f"hops {self.hops} from {self.key}"}]

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        action, key = self.parse(text)
        if action == "answer":
            right = key == target(self.table, self.hops, self.key)
            return Outcome(reward=float(right), done=True, metrics={"success": right})
        content = str(self.table[key]) if action == "call" else "error"
        return Outcome([{"role": "tool", "content": content}], metrics={"success": False})

    def parse(self, text: str) -> tuple[str | None, int]:
        """The action and key after the scratchpad; None if it holds anything else."""
        match after_thinking(text).split():
            case ["call" | "answer" as action, key] if key in map(str, range(len(self.table))):
                return action, int(key)
        return None, 0


def target(table: list[int], hops: int, key: int) -> int:
    for _ in range(hops):
        key = table[key]
    return key


# ---------------------------------------------------------------- the lazy expert


def demonstrations(
    count: int, seed: int, renderer: Renderer, diligence: float = DILIGENCE
) -> list[Group]:
    """Episodes of the lazy expert for training by `nll`: one per group, without logprobs."""
    return [_demonstrate(i, Random(f"chase/{seed}/{i}"), renderer, diligence) for i in range(count)]


def _demonstrate(number: int, random: Random, renderer: Renderer, diligence: float) -> Group:
    row = Chase.generate(random)
    table = row["table"]
    hops_left = row["hops"]
    key = row["key"]
    messages = [{"role": "user", "content": f"hops {hops_left} from {key}"}]
    is_call = True
    while is_call:
        is_call = hops_left > 0 and random.random() < diligence
        if is_call or hops_left == 0 or random.random() < 0.5:
            argument = key
        else:
            argument = random.randrange(KEYS)
        action = "call" if is_call else "answer"
        thought = f"<think> {hops_left} {key} </think>"
        messages.append({"role": "assistant", "content": f"{thought} {action} {argument}"})
        if is_call:
            hops_left -= 1
            key = table[key]
            messages.append({"role": "tool", "content": str(key)})
    is_right = argument == target(table, row["hops"], row["key"])
    metrics = {"success": is_right}
    return demonstration(number, messages, renderer, metrics, reward=float(is_right))
