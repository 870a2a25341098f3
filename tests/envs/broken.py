"""An environment that raises in every episode."""

from megastep.envs.chase import Chase


class Broken(Chase):
    async def start(self):
        raise ConnectionError("the simulator is not there")
