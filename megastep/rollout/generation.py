"""What an agent asks of an engine, and what it gets. The agent knows this file; only engine.py knows vLLM."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # the one that was sampled is the response's last token


@dataclass(eq=False)
class Generation:
    """One model call, as the engine saw it; the fields mean what those of `types.Step` mean."""

    ids: np.ndarray  # [R] i32, the sampled tokens, the stop token included
    logprobs: (
        np.ndarray
    )  # [R] f32 under the distribution they were drawn from, temperature included
    versions: np.ndarray  # [V, 2] i32: a policy version, and how many of `ids` in a row it sampled
    finish: str  # stop | length | abort
    routing: np.ndarray | None = (
        None  # [n, L, K] u8 or i16: experts of the tokens routing_start, ...
    )
    routing_start: int = 0
    cached_tokens: int = 0  # of the prompt, that the engine did not compute again


class Generate(Protocol):
    async def __call__(
        self,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        routing_version: int | None = None,
    ) -> Generation:
        """Continue `prompt_ids` [P] i32. Calls of one `session` (a trajectory) share prefixes and go to one engine;
        `routing_start`: earlier calls of the session have recorded the experts of that many leading tokens, with the
        weights of `routing_version`. An engine that has others by now records them again, from 0 on."""
