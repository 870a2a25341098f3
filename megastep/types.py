"""The records that travel from the rollout to the policy. A leaf: numpy only, nothing of ours.

    Group ─┬─ Trajectory ─┬─ Step      one model call: ids in, ids out
           │              └─ Step
           └─ Trajectory ─── Step
              Sample                   a step with its identity, its advantage and its weight
              Trie                     the steps of a prompt, every distinct token once, and their loss table
              MicroBatch               what one forward pass of one rank computes

A worked example. The chat template drops the thinking `T` of turn 1 from the history of turn 2:

    step 0   prompt [A B]          response [T C .]
    step 1   prompt [A B C . O]    response [D .]

    trie     index      0  1  2  3  4  5  6  7        A B ─┬─ T C
             token      A  B  T  C  C  .  O  D             └─ C . O D
             position   0  1  2  3  2  3  4  5
             end        8  8  4  4  8  8  8  8

    loss     src        1  2  3  6  7                 the token whose hidden state predicts the target
             target     T  C  .  D  .
             step       0  0  0  1  1

Token `k` is visible to token `q` iff `k <= q < end[k]`. A trie with several roots is a forest; the predicate keeps
its trees apart. The last token of a step predicts nothing, so nobody computes it.
"""

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property

import numpy as np

FREE = -1  # an expert index: the live router decides
PADDING = -1  # group, trajectory and step of a row that belongs to nobody
MAX_LOGPROB = 1e-4  # 0, and what rounding may add to it


# ---------------------------------------------------------------- rollouts


class FinishReason(StrEnum):
    """How one model call ended. Rollout files store the position in this list: only append."""

    STOP = "stop"  # the model ended its turn
    LENGTH = "length"  # rollout.max_response_tokens
    CONTEXT = "context"  # the next prompt would have been too long
    ABORT = "abort"  # the engine cancelled the request
    ERROR = "error"  # the environment or the engine failed


class StopReason(StrEnum):
    """How an episode ended; see rollout/agent.py."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    CONTEXT = "context"
    FIRST_PROMPT = "first_prompt"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    ENGINE_ERROR = "engine_error"
    ABORT = "abort"


FAILED = (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT, StopReason.ENGINE_ERROR, StopReason.ABORT)
TRUNCATED = (FinishReason.LENGTH, FinishReason.CONTEXT)


@dataclass(eq=False)
class Step:
    """One model call. `response_ids` holds generated tokens; what the environment answers is in the next prompt.

    A token appended after the fact (EOS) stays in `response_ids`, with `loss_mask` False and `logprob` 0.
    """

    index: int  # which call of its trajectory, from 0
    last: bool  # is it the trajectory's final call
    prompt_ids: np.ndarray  # [P] i32
    response_ids: np.ndarray  # [R] i32
    loss_mask: np.ndarray  # [R] bool: which response tokens are trained
    logprobs: (
        np.ndarray | None
    )  # [R] f32 under the policy that sampled them, of trained tokens; None: not recorded
    versions: (
        np.ndarray
    )  # [V, 2] i32: a policy version, and how many response tokens in a row it sampled
    reward: float = 0.0
    finish: str = FinishReason.STOP
    # Experts of the tokens routing_start, routing_start + 1, ... as the engine recorded them. It never forwards
    # the last token it samples, and may leave out a prefix of the prompt that an earlier step has recorded.
    routing: np.ndarray | None = None  # [n, L, K] u8 or i16
    routing_start: int = 0
    state: int | None = (
        None  # the environment's name for where it was; None: the prompt is the name
    )

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def routing_end(self) -> int:
        """The first token after those with recorded experts."""
        return self.routing_start + (0 if self.routing is None else len(self.routing))


@dataclass(eq=False)
class Trajectory:
    group_id: int
    index: int  # which sample of its prompt
    steps: list[Step]  # none: the first prompt was already too long
    stop_reason: str = StopReason.DONE
    env_metrics: dict = field(default_factory=dict)  # what the environment reports; JSON values

    @property
    def reward(self) -> float:
        """The sum over the steps, rounded once: the same in whatever order the rewards came."""
        rewards = [step.reward for step in self.steps]
        try:
            return math.fsum(rewards)
        except (OverflowError, ValueError):  # beyond the largest number, or inf - inf: not finite
            return float(sum(rewards))


@dataclass(eq=False)
class Group:
    id: int  # names the prompt; one group per id in a batch
    trajectories: list[Trajectory]


@dataclass(frozen=True)
class ExpertShape:
    """What the experts recorded for a model look like."""

    experts: int  # per layer
    top_k: int
    moe_layers: tuple[
        bool, ...
    ]  # of all layers, those with experts; what is recorded for the others means nothing


# ---------------------------------------------------------------- samples and tries


@dataclass(eq=False)
class Sample:
    """A step, whose it is, and what the loss does with it. A layout moves samples around and changes none."""

    step: Step
    group: int
    trajectory: int
    advantage: float
    weight: float  # of each trained token


@dataclass(eq=False)
class LossTable:
    """One row per trained token. The rows of a step are contiguous, in the order of its tokens, so their sources lie on
    one path and the last is the deepest."""

    src: np.ndarray  # [N] i32: the trie token whose hidden state predicts the target
    target: np.ndarray  # [N] i32
    advantage: np.ndarray  # [N] f32
    weight: np.ndarray  # [N] f32; 0 for a padding
    rollout_logprob: np.ndarray  # [N] f32; NaN where the rollout recorded none
    group: np.ndarray  # [N] i32; PADDING for a padding
    trajectory: np.ndarray  # [N] i32
    step: np.ndarray  # [N] i32
    old_logprob: np.ndarray | None = None  # [N] f32: under the policy before the update
    ref_logprob: np.ndarray | None = None  # [N] f32: under the reference

    def __len__(self) -> int:
        return len(self.src)

    def step_starts(self) -> np.ndarray:
        """The first row of each step."""
        change = np.ones(len(self), bool)
        change[1:] = False
        for ids in (self.group, self.trajectory, self.step):
            change[1:] |= ids[1:] != ids[:-1]
        return np.flatnonzero(change)

    def take(self, rows: np.ndarray | slice) -> "LossTable":
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return LossTable(
            **{name: None if column is None else column[rows] for name, column in columns.items()}
        )


@dataclass(eq=False)
class Routes:
    """Experts of the tokens of a trie, by reference to what the steps recorded: token start[i] + j has rows[i][j].

    Tokens outside every run are free. The arrays are copied once, by `gather`, where they are used.
    """

    start: np.ndarray  # [n] i32, ascending
    rows: list[np.ndarray]  # n views [length, L, K] of Step.routing
    shape: tuple[int, int]  # L, K

    def gather(self, tokens: int, layers: slice = slice(None)) -> np.ndarray:
        """[tokens, layers, K], i8 where every expert's number fits and i16 else; FREE where nothing is recorded."""
        fits = all(rows.dtype == np.uint8 and rows.max(initial=0) < 128 for rows in self.rows)
        dtype = np.int8 if fits else np.int16
        out = np.empty((tokens, len(range(self.shape[0])[layers]), self.shape[1]), dtype)
        at = 0
        for start, rows in zip(self.start.tolist(), self.rows):
            out[at:start] = FREE
            at = start + len(rows)
            out[start:at] = (rows.view(np.int8) if fits else rows)[:, layers]
        out[at:] = FREE
        return out


@dataclass(eq=False)
class Trie:
    """Tokens in depth-first order, their experts, and the loss table that hangs on them."""

    tokens: np.ndarray  # [T] i32
    position: np.ndarray  # [T] i32: depth, 0 at a root
    end: np.ndarray  # [T] i32: the first index after the token's subtree
    loss: LossTable
    routes: Routes | None = None  # None: no step recorded its experts

    def __len__(self) -> int:
        return len(self.tokens)

    def routing(self, layers: slice = slice(None)) -> np.ndarray | None:
        """Experts per token, see Routes.gather; a pipeline stage asks for its own layers."""
        return None if self.routes is None else self.routes.gather(len(self), layers)

    @cached_property
    def node_starts(self) -> np.ndarray:
        """Where a run of tokens begins that are each other's only child."""
        start = np.ones(len(self), bool)
        start[1:] = (self.end[1:] != self.end[:-1]) | (self.position[1:] != self.position[:-1] + 1)
        return np.flatnonzero(start).astype(np.int32)

    def sequence_starts(self) -> np.ndarray:
        """The roots: where no node branches, these are the starts of the packed sequences."""
        return np.flatnonzero(self.position == 0)

    @property
    def branches(self) -> bool:
        return len(self.node_starts) > len(self.sequence_starts())

    @property
    def sequences(self) -> int:
        """Paths from a root to a leaf."""
        return int(np.count_nonzero(self.end == np.arange(1, len(self) + 1)))


@dataclass(eq=False)
class MicroBatch:
    """A forest under the token budget, padded to the alignment. A padding has one row, of weight 0, no real token."""

    trie: Trie
    real_tokens: int  # the tokens before the padding
