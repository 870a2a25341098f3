"""Failing environments: one raises in every episode, the other never generates its rows."""

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
        """Creates the file that the environment variable names, then hangs."""
        Path(os.environ["ENDLESS_BEGAN"]).touch()
        time.sleep(300)
