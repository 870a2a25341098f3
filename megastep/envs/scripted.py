"""Scripted episodes of an environment, written as conversations for `warm_start.data`."""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megastep.rollout.env import Env, Message

NO_IDS = np.array([], np.int32)


async def conversation(env: Env, turns: list[str]) -> tuple[list[Message], float]:
    """The messages of an episode with these assistant turns, and its reward."""
    messages = list(await env.start())
    reward = 0.0
    for text in turns:
        outcome = await env.step(text, NO_IDS)
        messages += [{"role": "assistant", "content": text}, *outcome.observation]
        reward += outcome.reward
    await env.close()
    return messages, reward


async def write_conversations(path: Path, episodes: Iterable[tuple[Env, list[str]]]) -> None:
    """JSON lines; an episode without reward 1 would teach a mistake, and raises ValueError."""
    rows = []
    for env, turns in episodes:
        messages, reward = await conversation(env, turns)
        if reward != 1:
            raise ValueError(f"{path}: an episode has reward {reward:g}: {turns}")
        rows.append(json.dumps({"messages": messages}) + "\n")
    await asyncio.to_thread(path.write_text, "".join(rows))
