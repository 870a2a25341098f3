"""The interface between agent and engine, without vLLM."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np


class Session(NamedTuple):
    """A trajectory: its calls share prefixes, and those of its group share the first prompt."""

    group: str
    sample: int


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # the sampled one is the last token of the response
    # Further parameters of vLLM, of calls that are not trained.
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def distribution(self) -> dict[str, float]:
        """What logprobs depend on besides the model, as in `types.Trajectory`."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


@dataclass(eq=False)
class Generation:
    """The engine's result of one model call; fields as in `types.Step`."""

    ids: np.ndarray  # [R] i32: the sampled tokens, stop token included
    logprobs: np.ndarray  # [R] f32: under the sampling distribution, temperature included
    versions: np.ndarray  # [V, 2] i32: weight version, number of consecutive `ids` it sampled
    finish: str  # FinishReason.STOP, LENGTH or ABORT
    routing: np.ndarray | None = None  # [n, L, K] u8 or i16: of tokens routing_start, ...
    routing_start: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache


class Generate(Protocol):
    async def __call__(
        self,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        *,
        session: Session,
        routing_start: int = 0,
        routing_version: int | None = None,
    ) -> Generation:
        """Continue `prompt_ids` [P] i32. Calls of one `session` go to one engine, those of one
        group too while its load allows. Earlier calls of the session have recorded the routing of
        the first `routing_start` tokens under weight version `routing_version`; an engine with
        another version records it again from token 0."""
