"""skyrl: runs an environment written for `skyrl-gym`, unchanged.

    env:
      name: skyrl
      options:
        env: text2sql                       an id of skyrl_gym.register; default: the row's column env_class
        config: {db_path: data/sql}         its env_config
        max_turns: 6                        given to it among the extras

Rows are those of SkyRL's data sets: `prompt` (chat messages), `reward_spec`, and whatever else the environment wants;
all of them but `prompt` are its extras. `postprocessed_action` is ignored: the tokens of a response are those that were
sampled. The environment's calls block, so they run in a thread.
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
        self.row, self.name, self.config, self.max_turns = (
            row,
            env or row.get("env_class"),
            config or {},
            max_turns,
        )
        if self.name is None:
            raise EnvError("env.options.env: must be given, the row has no column env_class")
        self.inner = None

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
        made = await in_thread(self.inner.step, text)
        metrics = {
            name: value for name, value in self.inner.get_metrics().items() if _is_json(value)
        }
        return Outcome(made["observations"], made["reward"], made["done"], metrics)

    async def close(self) -> None:
        if self.inner is not None:
            await in_thread(self.inner.close)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, default=plain)
    except (TypeError, ValueError):
        return False
    return True
