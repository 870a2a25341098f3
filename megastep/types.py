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
from functools import cached_property

import numpy as np

FINISHES = ("stop", "length", "context", "abort", "error")
FREE = -1  # an expert index: the live router decides
FILLER = -1  # group, trajectory and step of a row that belongs to nobody
MAX_LOGPROB = 1e-4  # 0, and what rounding may add to it


class RolloutError(ValueError):
    """Everything that is wrong with a rollout, one line each."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems

    def summary(self) -> str:
        """The first, and how many more there are: one line for a file that may hold thousands."""
        first, more = self.problems[0], len(self.problems) - 1
        first = first if len(first) <= 300 else first[:297] + "..."
        return first + (f" (and {more} more)" if more else "")


class TrainingError(RuntimeError):
    """A rank refuses to go on: what it was given, or what became of it, is not what was meant. One line."""


# ---------------------------------------------------------------- rollouts


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
    logprobs: np.ndarray | None  # [R] f32 under the policy that sampled them, of trained tokens; None: not recorded
    versions: np.ndarray  # [V, 2] i32: a policy version, and how many response tokens in a row it sampled
    reward: float = 0.0
    finish: str = "stop"
    # Experts of the tokens routing_start, routing_start + 1, ... as the engine recorded them. It never forwards
    # the last token it samples, and may leave out a prefix of the prompt that an earlier step has recorded.
    routing: np.ndarray | None = None  # [n, L, K] u8 or i16
    routing_start: int = 0
    state: int | None = None  # the environment's name for where it was; None: the prompt is the name

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
    stop_reason: str = "done"
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
    moe_layers: tuple[bool, ...]  # of all layers, those with experts; what is recorded for the others means nothing


def validate(groups: list[Group], vocab: int | None = None, experts: ExpertShape | None = None) -> None:
    """Raise RolloutError with every violation found, each with the trajectory and step it is in.

    vocab: the model's tokens; another tokenizer's ids would get a probability all the same. With `experts`, which
    replay needs, every step that is trained must have recorded its experts, and they must be possible ones.
    """
    problems = []
    shapes: dict[tuple, str] = {}  # (L, K, dtype) of the recorded experts → where it was first seen
    seen = set()
    for group in groups:
        if not 0 <= group.id < 2**31:
            problems.append(f"group {group.id}: id must be from 0 to 2^31 - 1")
        if group.id in seen:
            problems.append(f"group {group.id}: appears twice in the batch")
        seen.add(group.id)
        indices = [t.index for t in group.trajectories]
        if len(set(indices)) < len(indices) or min(indices, default=0) < 0:
            problems.append(f"group {group.id}: trajectory indices {indices} must be distinct and not negative")
        for trajectory in group.trajectories:
            problems += _trajectory_problems(group, trajectory, shapes)
            for step in trajectory.steps:
                where = f"group {group.id}, trajectory {trajectory.index}, step {step.index}"
                problems += [f"{where}: {problem}" for problem in _model_problems(step, vocab, experts)]
    if len(shapes) > 1:
        problems.append("experts: one shape and dtype per batch, found " + "; ".join(
            f"{layers} layers × {top_k} {dtype} in {where}" for (layers, top_k, dtype), where in shapes.items()
        ))
    if problems:
        raise RolloutError(problems)


def _trajectory_problems(group: Group, trajectory: Trajectory, shapes: dict) -> list[str]:
    where = f"group {group.id}, trajectory {trajectory.index}"
    problems = []
    if trajectory.group_id != group.id:
        problems.append(f"{where}: group_id is {trajectory.group_id}")
    indices = [step.index for step in trajectory.steps]
    if indices != list(range(len(indices))):
        problems.append(f"{where}: steps {indices} must be contiguous from 0")
    last = [step.index for step in trajectory.steps if step.last]
    if trajectory.steps and (len(last) != 1 or not trajectory.steps[-1].last):
        problems.append(f"{where}: steps marked last: {last}; the final one must be, and no other")
    for step in trajectory.steps:
        problems += [f"{where}, step {step.index}: {problem}" for problem in _step_problems(step)]
        if step.routing is not None and step.routing.ndim == 3:
            shapes.setdefault((*step.routing.shape[1:], str(step.routing.dtype)), f"{where}, step {step.index}")
    return problems or _unrecorded(trajectory, where)


def _unrecorded(trajectory: Trajectory, where: str) -> list[str]:
    """Steps that leave out experts which no earlier step has for the same tokens."""
    problems = []
    for i, step in enumerate(trajectory.steps):
        start = step.routing_start
        if step.routing is None or start == 0:
            continue
        known = recorded_tokens(trajectory.steps[:i], step.prompt_ids, start)
        if known < start:
            problems.append(f"{where}, step {step.index}: experts begin at token {start}, and earlier steps have "
                            f"recorded {known} tokens of its prompt")
    return problems


def recorded_tokens(steps: list[Step], prompt_ids: np.ndarray, most: int) -> int:
    """How many leading tokens of a prompt, counted up to `most`, have their experts recorded by earlier steps.

    A token's experts depend on all tokens before it, so they hold as far as the prompt repeats a step's sequence token
    by token. What a step left out, those before it had: its own end is what counts.
    """
    longest = 0
    for step in reversed(steps):  # the one before has most of it, as a rule
        end = min(step.routing_end, most)
        if step.routing is not None and end > longest:
            longest = max(longest, _repeated(step, prompt_ids[:end]))
        if longest == most:
            break
    return longest


def _repeated(step: Step, ids: np.ndarray) -> int:
    """How many leading tokens of `ids` are those of the step."""
    prompt = _common_prefix(step.prompt_ids, ids)
    if prompt < len(step.prompt_ids):
        return prompt
    return prompt + _common_prefix(step.response_ids, ids[prompt:])


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


_COLUMNS = {"prompt_ids": np.dtype(np.int32), "response_ids": np.dtype(np.int32), "loss_mask": np.dtype(bool),
            "logprobs": np.dtype(np.float32)}


def _step_problems(step: Step) -> list[str]:
    problems = _array_problems(step)
    if not problems and step.logprobs is not None:
        wrong = _wrong_logprob(step)
        if wrong is not None:
            problems.append(f"logprobs holds {wrong} for a trained token; finite numbers of at most 0 are needed, or "
                            "no array where none were recorded")
    if not len(step.prompt_ids):
        problems.append("prompt_ids is empty; the first response token needs a token that predicts it")
    problems += _version_problems(step)
    if step.finish not in FINISHES:
        problems.append(f"finish is {step.finish!r}; one of {', '.join(FINISHES)} is needed")
    return problems + ([] if step.routing is None else _routing_problems(step))


def _array_problems(step: Step) -> list[str]:
    response = len(step.response_ids)
    problems = []
    for name, dtype in _COLUMNS.items():
        array = getattr(step, name)
        if array is None and name == "logprobs":
            continue
        if array.ndim != 1 or array.dtype != dtype:
            problems.append(f"{name} is {array.dtype} with {array.ndim} axes; {dtype} with one is needed")
        if name in ("loss_mask", "logprobs"):
            if len(array) != response:
                problems.append(f"{name} has {len(array)} entries for {response} response tokens")
        elif array.min(initial=0) < 0:
            problems.append(f"{name} holds the negative id {array.min()}")
    return problems


def _version_problems(step: Step) -> list[str]:
    versions, response = step.versions, len(step.response_ids)
    if versions.dtype != np.int32 or versions.ndim != 2 or versions.shape[1] != 2:
        return [f"versions is {versions.dtype} {list(versions.shape)}; int32 rows (version, tokens) are needed"]
    covered = int(versions[:, 1].sum())
    if versions.min(initial=0) < 0:
        return [f"versions holds the negative number {versions.min()}"]
    return [] if covered == response else [f"versions cover {covered} of {response} response tokens"]


def _wrong_logprob(step: Step) -> float | None:
    """One of a trained token that cannot be a logprob. Those of other tokens mean nothing."""
    logprobs = step.logprobs
    if logprobs.min(initial=0) > -np.inf and logprobs.max(initial=0) <= MAX_LOGPROB:  # neither is true of NaN
        return None  # most steps need no closer look
    trained = logprobs[step.loss_mask]
    bad = trained[~(np.isfinite(trained) & (trained <= MAX_LOGPROB))]
    return float(bad[0]) if len(bad) else None


def _routing_problems(step: Step) -> list[str]:
    routing = step.routing
    if routing.ndim != 3 or routing.dtype not in (np.uint8, np.int16):
        return [f"routing is {routing.dtype} with {routing.ndim} axes; uint8 or int16 [tokens, layers, k] is needed"]
    trained = np.flatnonzero(step.loss_mask)
    # The source of the last trained token must have its experts; what comes after may (an appended EOS has none).
    need = len(step.prompt_ids) + int(trained[-1]) if len(trained) else 0
    most = max(len(step) - 1, 0)
    problems = []
    if not 0 <= step.routing_start <= len(step.prompt_ids):
        prompt = len(step.prompt_ids)
        problems.append(f"routing_start is {step.routing_start}; it must lie in 0 to {prompt}, the prompt")
    if not need <= step.routing_end <= most:
        problems.append(f"routing ends before token {step.routing_end}; its end must lie in {need} to {most}")
    return problems


def _model_problems(step: Step, vocab: int | None, shape: ExpertShape | None) -> list[str]:
    """What the model could not have made."""
    problems = []
    for name in ("prompt_ids", "response_ids"):
        ids = getattr(step, name)
        if vocab is not None and ids.size and ids.max() >= vocab:
            problems.append(f"{name} holds the id {ids.max()}; the model's vocabulary ends at {vocab - 1}")
    if shape is not None and step.loss_mask.any():
        problem = _experts_problem(step, shape)
        problems += [] if problem is None else [problem]
    return problems


def _experts_problem(step: Step, shape: ExpertShape) -> str | None:
    routing = step.routing
    if routing is None:
        return "no experts recorded, and replay.enabled needs them"
    layers = len(shape.moe_layers)
    if routing.ndim != 3 or routing.shape[1:] != (layers, shape.top_k):
        return f"experts of shape {list(routing.shape)}; the model has [tokens, {layers} layers, top {shape.top_k}]"
    chosen = routing if all(shape.moe_layers) else routing[:, np.array(shape.moe_layers)]
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < shape.experts:
        bad = chosen.min() if chosen.min() < 0 else chosen.max()
        return f"expert {bad} recorded; the model has 0 to {shape.experts - 1}"
    for other in range(1, shape.top_k):  # every pair, a column at a time: no sorted copy of all experts
        twice = chosen[..., other:] == chosen[..., :-other]
        if twice.any():
            token, layer, _ = np.argwhere(twice)[0].tolist()
            return f"token {step.routing_start + token} has one expert twice in the model's MoE layer {layer}"
    return None


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
    weight: np.ndarray  # [N] f32; 0 for a filler
    rollout_logprob: np.ndarray  # [N] f32; NaN where the rollout recorded none
    group: np.ndarray  # [N] i32; FILLER for a filler
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
        return LossTable(**{name: None if column is None else column[rows] for name, column in columns.items()})


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
    """A forest under the token budget, padded to the alignment. A filler has one row, of weight 0, no real token."""

    trie: Trie
    real_tokens: int  # the tokens before the padding
