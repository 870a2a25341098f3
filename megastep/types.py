"""Records passed from the rollout to the policy. Imports numpy and no module of megastep.

    Group ─┬─ Trajectory ─┬─ Step      one model call: ids in, ids out
           │              └─ Step
           └─ Trajectory ─── Step
              Sample                   a step with its identity, advantage and weight
              Trie                     the steps of a prompt, each distinct token once; loss table
              MicroBatch               the tokens of one forward pass of one rank

A worked example. The chat template drops the thinking `T` of turn 1 from the history of turn 2:

    step 0   prompt [A B]          response [T C .]
    step 1   prompt [A B C . O]    response [D .]

    trie     index      0  1  2  3  4  5  6  7        A B ─┬─ T C
             token      A  B  T  C  C  .  O  D             └─ C . O D
             position   0  1  2  3  2  3  4  5
             end        8  8  4  4  8  8  8  8

    loss     src        1  2  3  6  7              its hidden state predicts the target
             target     T  C  .  D  .
             step       0  0  0  1  1

The prompt of step 1 repeats two tokens of step 0: it is stored as these and [C . O] (`Prompt`).

Token `k` is visible to token `q` iff `k <= q < end[k]`. A trie with several roots is a forest; the
predicate separates its trees. The last token of a step predicts nothing and is not computed.
"""

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property

import numpy as np

FREE = -1  # an expert index: the live router decides
PADDING = -1  # group, trajectory and step of a padding row
MAX_LOGPROB = 1e-4  # 0 plus rounding


# ---------------------------------------------------------------- rollouts


class FinishReason(StrEnum):
    """Why a model call ended. Rollout files store the position in this list: only append."""

    STOP = "stop"  # the model ended its turn
    LENGTH = "length"  # rollout.max_response_tokens
    CONTEXT = "context"  # the next prompt would exceed the context length
    ABORT = "abort"  # the engine cancelled the request
    ERROR = "error"  # the environment or the engine failed


class StopReason(StrEnum):
    """Why an episode ended; see rollout/agent.py."""

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


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A prompt that begins as an earlier step: a reference to that step's tokens, and what is new.

    Whole prompts would take memory in the square of the number of turns.
    """

    base: "np.ndarray | Prompt"  # prompt of the earlier step
    response_ids: np.ndarray  # its response
    shared: int  # leading tokens of the two that the prompt repeats
    new: np.ndarray  # [n] i32: the tokens after these

    def __len__(self) -> int:
        return self.shared + len(self.new)

    def ids(self) -> np.ndarray:
        """[P] i32, read-only: a new array at each call."""
        parts = [self.new]  # the last ones first
        base: np.ndarray | Prompt = self
        missing = self.shared  # tokens before those in `parts`
        while isinstance(base, Prompt):
            response_ids = base.response_ids
            base = base.base
            if missing > len(base):
                parts.append(response_ids[: missing - len(base)])
                missing = len(base)
            if isinstance(base, Prompt) and missing > base.shared:
                parts.append(base.new[: missing - base.shared])
                missing = base.shared
        parts.append(base[:missing])
        joined = np.concatenate(parts[::-1])
        joined.setflags(write=False)
        return joined


@dataclass(eq=False)
class RoutingTable:
    """The distinct rows of a group's recorded routing, stored elsewhere (samples/routing.py).

    The rows are in parts, so that a rank can fetch those of its trajectories, and a part is one
    object per pipeline stage, which holds the layers of that stage:

        row r    is row r - bounds[p] of part p, where bounds[p] <= r < bounds[p + 1]
        layer l  is in the objects of the stage s that has it in stages[s]

    References stay behind when the table is pickled: whoever fetches gets those that it needs.
    """

    bounds: np.ndarray  # [parts + 1] i64
    stages: list[tuple[int, ...]]  # the layers of each stage, ascending
    top_k: int
    dtype: np.dtype
    # stage → a reference to its list [part] of references to objects; None: a part without rows
    references: dict[int, object] = field(default_factory=dict)
    # (stage, part) → the object [rows, layers of the stage, K], where it is in this process
    arrays: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def __getstate__(self) -> dict:
        return vars(self) | {"references": {}}

    @property
    def shape(self) -> tuple[int, int]:
        """L, K."""
        return sum(map(len, self.stages)), self.top_k

    @property
    def nbytes(self) -> int:
        """Of all objects."""
        layers, top_k = self.shape
        return int(self.bounds[-1]) * layers * top_k * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class StoredRouting:
    """Routing by reference: token i has row rows[i] of the table. To its readers it is an array
    [n, L, K] that has no values until they are fetched.

    Two steps recorded the same experts for a token iff they have the same row for it.
    """

    table: RoutingTable
    rows: np.ndarray  # [n] i32
    problem: str | None = None  # of its values, found before they were stored

    ndim = 3

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, tokens: slice) -> "StoredRouting":
        return StoredRouting(self.table, self.rows[tokens], self.problem)

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self), *self.table.shape

    @property
    def dtype(self) -> np.dtype:
        return self.table.dtype

    def values(self, layers: slice = slice(None)) -> np.ndarray:
        """[n, layers, K]; the objects with them must be in `table.arrays`."""
        table = self.table
        total_layers, top_k = table.shape
        wanted = range(total_layers)[layers]
        out = np.empty((len(self), len(wanted), top_k), table.dtype)
        for stage, own_layers in enumerate(table.stages):
            columns = [i for i, layer in enumerate(wanted) if layer in own_layers]
            if columns:
                source = _as_slice([own_layers.index(wanted[i]) for i in columns])
                for start, stop, part, row in self._runs():
                    rows = table.arrays[stage, part][row : row + stop - start]
                    out[start:stop, _as_slice(columns)] = rows[:, source]
        return out

    def parts(self) -> np.ndarray:
        """The parts that hold its rows, ascending."""
        return np.unique(np.searchsorted(self.table.bounds, self.rows, side="right") - 1)

    def _runs(self) -> list[tuple[int, int, int, int]]:
        """Runs of consecutive rows of one part: (first token, first token after, part, row)."""
        if not len(self):
            return []
        part = np.searchsorted(self.table.bounds, self.rows, side="right") - 1
        begins = (np.diff(self.rows) != 1) | (np.diff(part) != 0)
        start = np.append(0, np.flatnonzero(begins) + 1)
        stop = np.append(start[1:], len(self))
        row = self.rows[start] - self.table.bounds[part[start]]
        columns = start, stop, part[start], row
        return list(zip(*(column.tolist() for column in columns)))


Routing = np.ndarray | StoredRouting


def _as_slice(indices: list[int]) -> slice | list[int]:
    """A slice copies faster."""
    if indices == list(range(indices[0], indices[-1] + 1)):
        return slice(indices[0], indices[-1] + 1)
    return indices


def routing_values(routing: Routing, layers: slice = slice(None)) -> np.ndarray:
    """[n, layers, K]."""
    return routing[:, layers] if isinstance(routing, np.ndarray) else routing.values(layers)


def routing_keys(routing: Routing) -> np.ndarray:
    """[n, m]: rows of a group that are equal here hold equal experts, and no others do."""
    if isinstance(routing, np.ndarray):
        return routing.reshape(len(routing), -1)
    return routing.rows[:, None]


@dataclass(eq=False)
class Step:
    """One model call. `response_ids` are generated; the observation is in the next prompt.

    A token appended after generation (EOS) is in `response_ids`, with loss mask False, logprob 0.
    """

    index: int  # in its trajectory, from 0
    last: bool  # the trajectory's final call
    # [P] i32; joined at each access if the step shares a prefix: `prompt_tokens` is its length
    prompt_ids: np.ndarray
    response_ids: np.ndarray  # [R] i32
    loss_mask: np.ndarray  # [R] bool: which response tokens are trained
    # [R] f32 under the policy that sampled them, defined for trained tokens; None: not recorded
    logprobs: np.ndarray | None
    # [V, 2] i32: a weight version, and how many response tokens in a row it sampled
    versions: np.ndarray
    reward: float = 0.0
    finish: str = FinishReason.STOP
    # Routed experts of the tokens from routing_start on, as the engine recorded them. The engine
    # never forwards the last token it samples; a prefix that an earlier step recorded may be left
    # out.
    routing: Routing | None = None  # [n, L, K] u8 or i16
    routing_start: int = 0
    # The environment's id of the state in which the step began; None: the prompt identifies it
    state: int | None = None

    def __len__(self) -> int:
        return self.prompt_tokens + len(self.response_ids)

    @property
    def prompt_tokens(self) -> int:
        return len(self._stored_prompt)

    @property
    def _stored_prompt(self) -> np.ndarray | Prompt:
        stored = vars(self)
        return stored["prompt_ids"] if "prompt_ids" in stored else stored["_prompt"]

    def share_prefix(self, previous: "Step", shared: int) -> None:
        """Store the first `shared` prompt tokens, which are the previous step's, by reference."""
        if shared:
            new = self.prompt_ids[shared:].copy()  # a view would keep the whole prompt
            self.prompt_ids = new
            self.prepend(previous, shared)

    def prepend(self, previous: "Step", shared: int) -> None:
        """Put the first `shared` tokens of the previous step before the prompt, by reference."""
        new = vars(self).pop("prompt_ids")
        base = previous._stored_prompt
        vars(self)["_prompt"] = Prompt(base, previous.response_ids, shared, new)

    def replaced(self, **values) -> "Step":
        """A copy with other values. dataclasses.replace would join a shared prefix."""
        other = Step.__new__(Step)
        vars(other).update(vars(self) | values)
        return other

    @property
    def routing_end(self) -> int:
        """The first token after those with recorded routing."""
        return self.routing_start + (0 if self.routing is None else len(self.routing))


class _JoinedPrompt:
    """`Step.prompt_ids` where the step has no such entry of its own, which would come first."""

    def __get__(self, step: Step | None, _: type) -> np.ndarray:
        if step is None:
            raise AttributeError("prompt_ids")
        return vars(step)["_prompt"].ids()


Step.prompt_ids = _JoinedPrompt()  # type: ignore[assignment]  # after dataclass: it is no default


@dataclass(eq=False)
class Trajectory:
    group_id: int
    index: int  # in its group
    steps: list[Step]  # empty: the first prompt was too long
    stop_reason: str = StopReason.DONE
    env_metrics: dict = field(default_factory=dict)  # reported by the environment; JSON values
    # temperature, top_p and top_k of the distribution whose logprobs the steps have; None: unknown
    sampling: dict[str, float] | None = None

    @property
    def reward(self) -> float:
        """The sum over the steps, rounded once: independent of their order."""
        rewards = [step.reward for step in self.steps]
        try:
            return math.fsum(rewards)
        except (OverflowError, ValueError):  # overflow, or inf - inf: not finite
            return float(sum(rewards))


@dataclass(eq=False)
class Group:
    id: int  # of the prompt; unique in a batch
    trajectories: list[Trajectory]


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a model, to validate recorded routing."""

    experts: int  # per layer
    top_k: int
    moe_layers: tuple[bool, ...]  # per layer; routing recorded for a dense layer is ignored


# ---------------------------------------------------------------- samples and tries


@dataclass(eq=False)
class Sample:
    """A step with its identity, advantage and weight. No pack layout changes any of them."""

    step: Step
    group: int
    trajectory: int
    advantage: float
    weight: float  # of each trained token


@dataclass(eq=False)
class LossTable:
    """One row per trained token.

    The rows of a step are contiguous and in the order of its tokens: their sources are on one path,
    the last is the deepest.
    """

    src: np.ndarray  # [N] i32: the trie token whose hidden state predicts the target
    target: np.ndarray  # [N] i32
    advantage: np.ndarray  # [N] f32
    weight: np.ndarray  # [N] f32; 0 in a padding row
    rollout_logprob: np.ndarray  # [N] f32; NaN where the rollout recorded none
    group: np.ndarray  # [N] i32; PADDING in a padding row
    trajectory: np.ndarray  # [N] i32
    step: np.ndarray  # [N] i32
    old_logprob: np.ndarray | None = None  # [N] f32: under the policy before the update
    ref_logprob: np.ndarray | None = None  # [N] f32: under the reference model
    teacher_logprob: np.ndarray | None = None  # [N] f32: under the teacher of a distillation

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
        taken: dict = {}
        for column in fields(self):
            values = getattr(self, column.name)
            taken[column.name] = None if values is None else values[rows]
        return LossTable(**taken)


@dataclass(eq=False)
class Routes:
    """Routing of a trie, by reference to that of the steps: token start[i] + j has rows[i][j].

    Tokens outside every run are free. `gather` copies the values, once, where they are used.
    """

    start: np.ndarray  # [n] i32, ascending
    rows: list[Routing]  # n slices [length, L, K] of Step.routing
    shape: tuple[int, int]  # L, K

    def gather(self, tokens: int, layers: slice = slice(None)) -> np.ndarray:
        """[tokens, layers, K] i8 if all expert indices of these layers fit, else i16; FREE where
        not recorded."""
        if all(rows.dtype == np.uint8 for rows in self.rows):
            out = self._copied(tokens, layers, np.dtype(np.int8))
            runs = zip(self.start.tolist(), self.rows)
            # Indices from 128 on read as negative. Only these layers are looked at.
            if all(out[start : start + len(rows)].min(initial=0) >= 0 for start, rows in runs):
                return out
        return self._copied(tokens, layers, np.dtype(np.int16))

    def _copied(self, tokens: int, layers: slice, dtype: np.dtype) -> np.ndarray:
        total_layers, top_k = self.shape
        out = np.empty((tokens, len(range(total_layers)[layers]), top_k), dtype)
        filled = 0
        for start, rows in zip(self.start.tolist(), self.rows):
            stop = start + len(rows)
            out[filled:start] = FREE
            values = routing_values(rows, layers)
            out[start:stop] = values.view(dtype) if dtype == np.int8 else values
            filled = stop
        out[filled:] = FREE
        return out


@dataclass(eq=False)
class Trie:
    """Tokens in depth-first order, their routing, and the loss table of their predictions."""

    tokens: np.ndarray  # [T] i32
    position: np.ndarray  # [T] i32: depth, 0 at a root
    end: np.ndarray  # [T] i32: the first index after the token's subtree
    loss: LossTable
    routes: Routes | None = None  # None: no step recorded routing

    def __len__(self) -> int:
        return len(self.tokens)

    def routing(self, layers: slice = slice(None)) -> np.ndarray | None:
        """Routed experts per token, see Routes.gather; a pipeline stage takes its own layers."""
        return None if self.routes is None else self.routes.gather(len(self), layers)

    @cached_property
    def node_starts(self) -> np.ndarray:
        """Starts of the nodes: runs of tokens that are each other's only child."""
        start = np.ones(len(self), bool)
        start[1:] = (self.end[1:] != self.end[:-1]) | (self.position[1:] != self.position[:-1] + 1)
        return np.flatnonzero(start).astype(np.int32)

    def sequence_starts(self) -> np.ndarray:
        """The roots; without branches, the starts of the packed sequences."""
        return np.flatnonzero(self.position == 0)

    @property
    def branches(self) -> bool:
        return len(self.node_starts) > len(self.sequence_starts())

    @property
    def sequences(self) -> int:
        """The number of paths from a root to a leaf."""
        return int(np.count_nonzero(self.end == np.arange(1, len(self) + 1)))


@dataclass(eq=False)
class MicroBatch:
    """A forest under the token budget, padded to the alignment.

    A padding micro-batch has no real token, and one loss row of weight 0.
    """

    trie: Trie
    real_tokens: int  # before the padding


@dataclass
class Update:
    """What one optimizer step returns to the driver, which imports neither torch nor Megatron."""

    metrics: dict[str, float]
    skipped: str | None = None  # why the optimizer step was not applied
