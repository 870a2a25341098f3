"""Environments that agent workers import."""

import asyncio
import os
from pathlib import Path

from megastep.rollout.env import Env, Outcome


class Where(Env):
    """Two turns; records the process in which it runs."""

    columns = {"n": int}

    async def start(self):
        self.turns = 0
        return [{"role": "user", "content": f"hops {1 + self.row['n'] % 3} from 7"}]

    async def step(self, text, ids):
        self.turns += 1
        metrics = {"pid": os.getpid(), "text": text}
        observation = [{"role": "user", "content": "hops 1 from 3"}]
        return Outcome(observation, done=self.turns == 2, metrics=metrics)


class Fatal(Where):
    """Prompt 3 ends its process."""

    async def step(self, text, ids):
        if self.row["n"] == 3:
            os._exit(1)
        return await super().step(text, ids)


class Hanging(Where):
    """Writes a file when it is closed."""

    def __init__(self, row, *, folder, secret=""):
        super().__init__(row)
        self.folder = Path(folder)
        self.secret = secret

    async def step(self, text, ids):
        (self.folder / f"stepping {self.row['n']}").touch()
        if self.secret:
            return Outcome(done=True, metrics={"secret": self.secret, "length": len(self.secret)})
        await asyncio.sleep(1000)

    async def close(self):
        await asyncio.sleep(0.2)
        (self.folder / f"closed {self.row['n']}").touch()
