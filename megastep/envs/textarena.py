"""textarena: the games for one player of the `textarena` library.

    env:
      name: textarena
      options:
        game: Mastermind-v0          an id of the library, without -raw
        config: {max_turns: 8}       keywords of the game

A row is a `seed`, the game's (`data.train: generated`). Each turn the model sees what the game has
written since its last move; a move is its text after the thinking. The reward is the game's, given
at the end; `success` is a reward of 1. Games that need a second player are an error: write those as
an agent with several calls.

The library's games draw from the global generators of Python and numpy. Here each game has states
of its own, which are put in place for its calls, one game at a time: otherwise a game would depend
on those that run at the same time, and the samples of a prompt would get different games.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megastep.envs.tags import after_thinking
from megastep.errors import EnvError
from megastep.rollout.env import Env, Outcome, in_thread
from megastep.text import one_line

_one_game = threading.Lock()  # of the global generators


class TextArena(Env):
    columns = {"seed": int}

    def __init__(self, row: dict[str, Any], *, game: str, config: dict[str, Any] | None = None):
        self.seed = row["seed"]
        self.name = game
        self.config = config or {}
        self.game: Any = None
        self.random_states: tuple | None = None  # None: the game has not begun

    @classmethod
    def generate(cls, random: random.Random) -> dict[str, Any]:
        return {"seed": random.getrandbits(31)}

    async def start(self):
        return await in_thread(self._start)

    def _start(self) -> list[dict]:
        import textarena

        try:
            with self._own_random():
                self.game = textarena.make(f"{self.name}-raw", **self.config)
                self.game.reset(num_players=1, seed=self.seed)
        except ValueError as error:
            raise EnvError(f"env.options.game = {self.name}: {one_line(error)}") from None
        except AssertionError as error:  # of the number of players
            raise EnvError(
                f"env.options.game = {self.name}: not a game for one player ({one_line(error)})"
            ) from None
        except TypeError as error:
            raise EnvError(f"env.options.config: {one_line(error)}") from None
        return self._observation()

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        return await in_thread(self._step, after_thinking(text).strip())

    def _step(self, move: str) -> Outcome:
        with self._own_random():
            done, _ = self.game.step(move)
        if not done:
            return Outcome(self._observation(), metrics={"success": False})
        rewards, players = self.game.close()
        reward = float((rewards or {}).get(0, 0.0))
        invalid = bool(players[0]["invalid_move"])
        metrics = {"success": reward == 1, "invalid_move": invalid}
        return Outcome(reward=reward, done=True, metrics=metrics)

    def _observation(self) -> list[dict]:
        """What the game wrote since the last move, as one message."""
        from textarena import ObservationType

        _, observed = self.game.get_observation()
        texts = [text for _, text, kind in observed if kind != ObservationType.PLAYER_ACTION]
        return [{"role": "user", "content": "\n".join(texts)}]

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _one_game:
            others = random.getstate(), np.random.get_state()
            if self.random_states is None:
                random.seed(self.seed)
                np.random.seed(self.seed)
            else:
                _set_random(*self.random_states)
            try:
                yield
            finally:
                self.random_states = random.getstate(), np.random.get_state()
                _set_random(*others)


def _set_random(python: tuple, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
