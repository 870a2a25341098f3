"""Environments that misbehave: one raises in every episode, another never has its rows."""

import os
import time
from pathlib import Path

from megastep.envs.chase import Chase


class Broken(Chase):
    async def start(self):
        raise ConnectionError("the simulator is not there")


class Endless(Chase):
    @classmethod
    def generate(cls, random):
        """Says that it was asked, in the file that the variable names."""
        Path(os.environ["ENDLESS_BEGAN"]).touch()
        time.sleep(300)
