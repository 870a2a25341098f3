"""skyrl: run an unchanged environment of `skyrl-gym`.

    env:
      name: skyrl
      options:
        env: text2sql                 an id of skyrl_gym.register; default: the column env_class
        config: {db_path: data/sql}   its env_config
        max_turns: 6                  passed in its extras

Rows are those of SkyRL's data sets: `prompt` (chat messages), `reward_spec`, and others that the
environment needs; all but `prompt` are its extras. `postprocessed_action` is ignored: the response
keeps its sampled tokens. The environment's calls block, so they run in a thread.
"""

import json
from typing import Any

import numpy as np

from megastep.errors import EnvError
from megastep.rollout.env import Env, Outcome, in_thread, plain


class SkyRL(Env):
    columns = {"prompt": list}

    def __init__(
        self,
        row: dict[str, Any],
        *,
        env: str | None = None,
        config: dict[str, Any] | None = None,
        max_turns: int | None = None,
    ):
        self.row = row
        self.name = env or row.get("env_class")
        self.config = config or {}
        self.max_turns = max_turns
        if self.name is None:
            raise EnvError("env.options.env: must be given, the row has no column env_class")
        self.inner: Any = None

    async def start(self):
        return await in_thread(self._start)

    def _start(self) -> list[dict]:
        import skyrl_gym
        from omegaconf import OmegaConf

        extras = {name: value for name, value in self.row.items() if name != "prompt"}
        if self.max_turns is not None:
            extras["max_turns"] = self.max_turns
        self.inner = skyrl_gym.make(
            self.name, env_config=OmegaConf.create(self.config), extras=extras
        )
        messages, _ = self.inner.init(self.row["prompt"])
        return messages

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        result = await in_thread(self.inner.step, text)
        reported = self.inner.get_metrics()
        metrics = {name: value for name, value in reported.items() if _is_json(value)}
        return Outcome(result["observations"], result["reward"], result["done"], metrics)

    async def close(self) -> None:
        if self.inner is not None:
            await in_thread(self.inner.close)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, default=plain)
    except (TypeError, ValueError):
        return False
    return True
