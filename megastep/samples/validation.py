"""Validation of rollouts against the data model (types.py)."""

import numpy as np

from megastep.config import Config
from megastep.errors import RolloutError
from megastep.models.architecture import read_architecture
from megastep.samples.prefix import shared_prefixes, shared_tokens
from megastep.types import (
    MAX_LOGPROB,
    ExpertShape,
    FinishReason,
    Group,
    Routing,
    Step,
    StoredRouting,
    Trajectory,
)


def model_limits(config: Config) -> tuple[int, ExpertShape | None]:
    """Vocabulary and, with routing replay, the shape of the routing: arguments of `validate`."""
    arch = read_architecture(config.model.path)
    if arch.experts is None or not config.routing_replay.enabled:
        return arch.vocab, None
    return arch.vocab, ExpertShape(arch.experts.count, arch.experts.top_k, arch.experts.layers)


def validate(
    groups: list[Group], vocab: int | None = None, experts: ExpertShape | None = None
) -> None:
    """Raise RolloutError with one line per violation, each naming its trajectory and step.

    vocab: the model's vocabulary size; the ids of another tokenizer would still get a probability.
    experts: given if routing replay is enabled; every trained step must then have recorded its
    routing, with experts that the model has.
    """
    problems = []
    shapes: dict[tuple, str] = {}  # (L, K, dtype) of recorded routing → where it was first seen
    seen: set[int] = set()  # group ids
    for group in groups:
        problems += _identity_problems(group, seen)
        seen.add(group.id)
        for trajectory in group.trajectories:
            problems += _trajectory_problems(group, trajectory, shapes)
            for step in trajectory.steps:
                where = f"group {group.id}, trajectory {trajectory.index}, step {step.index}"
                for problem in _model_problems(step, vocab, experts):
                    problems.append(f"{where}: {problem}")
    if len(shapes) > 1:
        found = [
            f"{layers} layers × {top_k} {dtype} in {where}"
            for (layers, top_k, dtype), where in shapes.items()
        ]
        problems.append(f"routing: one shape and dtype per batch, found {'; '.join(found)}")
    if problems:
        raise RolloutError(problems)


def _identity_problems(group: Group, seen: set[int]) -> list[str]:
    problems = []
    if not 0 <= group.id < 2**31:
        problems.append(f"group {group.id}: id must be from 0 to 2^31 - 1")
    if group.id in seen:
        problems.append(f"group {group.id}: appears twice in the batch")
    indices = [t.index for t in group.trajectories]
    if len(set(indices)) < len(indices) or min(indices, default=0) < 0:
        problems.append(
            f"group {group.id}: trajectory indices {indices} must be distinct and not negative"
        )
    return problems


def _trajectory_problems(
    group: Group, trajectory: Trajectory, shapes: dict[tuple, str]
) -> list[str]:
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
            shape = (*step.routing.shape[1:], str(step.routing.dtype))
            shapes.setdefault(shape, f"{where}, step {step.index}")
    return problems or unrecorded(trajectory, where)


def unrecorded(trajectory: Trajectory, where: str) -> list[str]:
    """Steps that leave out routing which no earlier step recorded for the same tokens.

    Stored routing was checked before it was stored.
    """
    problems: list[str] = []
    if not any(
        step.routing_start and isinstance(step.routing, np.ndarray) for step in trajectory.steps
    ):
        return problems
    for i, (step, prompt_ids, shared) in enumerate(shared_prefixes(trajectory.steps)):
        start = step.routing_start
        if step.routing is None or start == 0:
            continue
        recorded = recorded_tokens(trajectory.steps[:i], prompt_ids, start, shared)
        if recorded < start:
            problems.append(
                f"{where}, step {step.index}: routing begins at token {start}, but earlier steps "
                f"recorded {recorded} tokens of its prompt"
            )
    return problems


def recorded_tokens(
    steps: list[Step], prompt_ids: np.ndarray, most: int, shared: int | None = None
) -> int:
    """The number of leading prompt tokens, up to `most`, whose routing earlier steps recorded.

    The routing of a token depends on all tokens before it: it is valid as far as the prompt repeats
    a step's sequence token by token. Earlier steps recorded what a step left out, so only the end
    of its routing counts.

    shared: leading tokens that the prompt shares with the last of the steps, if they are known.
    """
    longest = 0
    for step in reversed(steps):  # the latest step usually shares the most
        end = min(step.routing_end, most)
        if step.routing is not None and end > longest:
            repeated = shared_tokens(step, prompt_ids[:end]) if shared is None else min(shared, end)
            longest = max(longest, repeated)
        if longest == most:
            break
        shared = None
    return longest


_COLUMNS = {
    "prompt_ids": np.dtype(np.int32),
    "response_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(bool),
    "logprobs": np.dtype(np.float32),
}


def _step_problems(step: Step) -> list[str]:
    problems = _array_problems(step)
    if not problems and step.logprobs is not None:
        wrong = _wrong_logprob(step.logprobs, step.loss_mask)
        if wrong is not None:
            problems.append(
                f"logprobs holds {wrong} for a trained token; finite numbers of at most 0 are "
                "needed, or no array where none were recorded"
            )
    if not step.prompt_tokens:
        problems.append(
            "prompt_ids is empty; the first response token needs a token that predicts it"
        )
    problems += _version_problems(step)
    if step.finish not in list(FinishReason):
        problems.append(f"finish is {step.finish!r}; one of {', '.join(FinishReason)} is needed")
    if isinstance(step.routing, np.ndarray):  # else checked before it was stored
        problems += routing_problems(step, step.routing)
    return problems


def _array_problems(step: Step) -> list[str]:
    response_tokens = len(step.response_ids)
    problems = []
    for name, dtype in _COLUMNS.items():
        array = getattr(step, name)
        if array is None and name == "logprobs":
            continue
        if array.ndim != 1 or array.dtype != dtype:
            problems.append(
                f"{name} is {array.dtype} with {array.ndim} axes; {dtype} with one is needed"
            )
        if name in ("loss_mask", "logprobs"):
            if len(array) != response_tokens:
                problems.append(
                    f"{name} has {len(array)} entries for {response_tokens} response tokens"
                )
        elif array.min(initial=0) < 0:
            problems.append(f"{name} holds the negative id {array.min()}")
    return problems


def _version_problems(step: Step) -> list[str]:
    versions = step.versions
    response_tokens = len(step.response_ids)
    if versions.dtype != np.int32 or versions.ndim != 2 or versions.shape[1] != 2:
        return [
            f"versions is {versions.dtype} {list(versions.shape)}; "
            "int32 rows (version, tokens) are needed"
        ]
    if versions.min(initial=0) < 0:
        return [f"versions holds the negative number {versions.min()}"]
    covered = int(versions[:, 1].sum())
    if covered != response_tokens:
        return [f"versions cover {covered} of {response_tokens} response tokens"]
    return []


def _wrong_logprob(logprobs: np.ndarray, loss_mask: np.ndarray) -> float | None:
    """The first value of a trained token that is no logprob. Other tokens may have any value."""
    # The fast path of almost every step; both comparisons are False for NaN.
    if logprobs.min(initial=0) > -np.inf and logprobs.max(initial=0) <= MAX_LOGPROB:
        return None
    trained = logprobs[loss_mask]
    bad = trained[~(np.isfinite(trained) & (trained <= MAX_LOGPROB))]
    return float(bad[0]) if len(bad) else None


def routing_problems(step: Step, routing: Routing) -> list[str]:
    if routing.ndim != 3 or routing.dtype not in (np.dtype(np.uint8), np.dtype(np.int16)):
        return [
            f"routing is {routing.dtype} with {routing.ndim} axes; "
            "uint8 or int16 [tokens, layers, k] is needed"
        ]
    prompt_tokens = step.prompt_tokens
    # Routing must reach the source of the last trained token. It may end there: the engine never
    # forwards an appended EOS.
    trained = np.flatnonzero(step.loss_mask)
    least = prompt_tokens + int(trained[-1]) if len(trained) else 0
    most = max(len(step) - 1, 0)
    problems = []
    if not 0 <= step.routing_start <= prompt_tokens:
        problems.append(
            f"routing_start is {step.routing_start}; it must lie in 0 to {prompt_tokens}, "
            "the prompt"
        )
    if not least <= step.routing_end <= most:
        problems.append(
            f"routing ends before token {step.routing_end}; its end must lie in {least} to {most}"
        )
    return problems


def _model_problems(step: Step, vocab: int | None, shape: ExpertShape | None) -> list[str]:
    """Ids and experts that the model does not have."""
    problems = []
    for name in ("prompt_ids", "response_ids"):
        ids = getattr(step, name)
        if vocab is not None and ids.size and ids.max() >= vocab:
            problems.append(
                f"{name} holds the id {ids.max()}; the model's vocabulary ends at {vocab - 1}"
            )
    if shape is not None and step.loss_mask.any():
        problem = _experts_problem(step, shape)
        if problem is not None:
            problems.append(problem)
    return problems


def _experts_problem(step: Step, shape: ExpertShape) -> str | None:
    routing = step.routing
    if routing is None:
        return "no routing recorded, and routing_replay.enabled needs it"
    layers = len(shape.moe_layers)
    if routing.ndim != 3 or routing.shape[1:] != (layers, shape.top_k):
        return (
            f"routing of shape {list(routing.shape)}; "
            f"the model has [tokens, {layers} layers, top {shape.top_k}]"
        )
    if isinstance(routing, StoredRouting):
        return routing.problem
    return values_problem(step, routing, shape)


def values_problem(step: Step, routing: np.ndarray, shape: ExpertShape) -> str | None:
    """Experts that the model does not have, or an expert twice in a layer of one token."""
    # [tokens, MoE layers, K]
    chosen = routing if all(shape.moe_layers) else routing[:, np.array(shape.moe_layers)]
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < shape.experts:
        bad = chosen.min() if chosen.min() < 0 else chosen.max()
        return f"expert {bad} recorded; the model has 0 to {shape.experts - 1}"
    # Compare every pair, one distance at a time: sorting would copy the whole array.
    for distance in range(1, shape.top_k):
        twice = chosen[..., distance:] == chosen[..., :-distance]
        if twice.any():
            row, layer, _ = np.argwhere(twice)[0].tolist()
            token = step.routing_start + row
            return f"token {token} has one expert twice in the model's MoE layer {layer}"
    return None
