"""chase: follow a hidden table with a lookup tool and a scratchpad.

    <bos> <user> hops 2 from 7 <eot> <asst>                   the question
    <think> 2 7 </think> call 7 <eot>                         how many hops remain and from where, in a scratchpad
    ... <asst> call 7 <eot> <tool> 12 <eot> <asst>            turn 2: the template dropped the scratchpad
    <think> 1 12 </think> call 12 <eot>
    ... <asst> call 12 <eot> <tool> 3 <eot> <asst>
    <think> 0 3 </think> answer 3 <eot>

`call k` returns table[k], `answer k` ends the episode, anything else returns `error`. Reward 1 for the right answer.
The agent's `rollout.max_turns` ends an episode that never answers; 5 is what the task was made for.

Columns of the data set, where episodes are not generated: `table` (a permutation of 0, 1, ...), `hops`, `key`.

A tiny model does not find this by chance: `demonstrations` plays a lazy expert whose scratchpad is right but who
answers too early more often than not. After a supervised start on those, RL has a bad habit to unlearn.
"""

from random import Random
from typing import Any

import numpy as np

from megastep.rollout.env import Env, Outcome
from megastep.rollout.renderer import Renderer
from megastep.types import Group, Step, Trajectory

KEYS = 16
MAX_HOPS = 3
DILIGENCE = 0.4  # how often the lazy expert looks up the next hop while there is one


class Chase(Env):
    columns = {"table": list, "hops": int, "key": int}

    def __init__(self, row: dict[str, Any]):
        self.table, self.hops, self.key = row["table"], row["hops"], row["key"]

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
        answer = str(self.table[key]) if action == "call" else "error"
        return Outcome([{"role": "tool", "content": answer}], metrics={"success": False})

    def parse(self, text: str) -> tuple[str | None, int]:
        """The action after the scratchpad, if there is one and nothing else."""
        words = text.rpartition("</think>")[2].split()
        if (
            len(words) != 2
            or words[0] not in ("call", "answer")
            or words[1] not in map(str, range(len(self.table)))
        ):
            return None, 0
        return words[0], int(words[1])


def target(table: list[int], hops: int, key: int) -> int:
    for _ in range(hops):
        key = table[key]
    return key


# ---------------------------------------------------------------- the lazy expert


def demonstrations(
    count: int, seed: int, renderer: Renderer, diligence: float = DILIGENCE
) -> list[Group]:
    """Episodes of the lazy expert, as a rollout to be trained on by `nll`: a group each, no logprobs."""
    return [_demonstrate(i, Random(f"chase/{seed}/{i}"), renderer, diligence) for i in range(count)]


def _demonstrate(number: int, random: Random, renderer: Renderer, diligence: float) -> Group:
    row = Chase.generate(random)
    table, left, key = row["table"], row["hops"], row["key"]
    history = renderer.history([{"role": "user", "content": f"hops {left} from {key}"}])
    steps = []
    while True:
        call = left > 0 and random.random() < diligence
        told = key if call or left == 0 or random.random() < 0.5 else random.randrange(KEYS)
        said = f"<think> {left} {key} </think> {'call' if call else 'answer'} {told}"
        response = np.array(
            [*renderer.tokenizer.encode(said, add_special_tokens=False), renderer.end_id], np.int32
        )
        right = not call and told == target(table, row["hops"], row["key"])
        steps.append(
            _demonstrated(
                len(steps), history.prompt_ids, response, last=not call, reward=float(right)
            )
        )
        if not call:
            return Group(number, [Trajectory(number, 0, steps, "done", {"success": right})])
        left, key = left - 1, table[key]
        history.extend(response, [{"role": "tool", "content": str(key)}])


def _demonstrated(
    index: int, prompt_ids: np.ndarray, response: np.ndarray, last: bool, reward: float
) -> Step:
    return Step(
        index=index,
        last=last,
        prompt_ids=prompt_ids,
        response_ids=response,
        loss_mask=np.ones(len(response), bool),
        logprobs=None,
        versions=np.array([[0, len(response)]], np.int32),
        reward=reward,
    )
