"""Validation of rollouts against the data model (types.py)."""

import numpy as np

from megastep.errors import RolloutError
from megastep.samples.prefix import common_prefix
from megastep.types import MAX_LOGPROB, ExpertShape, FinishReason, Group, Step, Trajectory


def validate(
    groups: list[Group], vocab: int | None = None, experts: ExpertShape | None = None
) -> None:
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
            problems.append(
                f"group {group.id}: trajectory indices {indices} must be distinct and not negative"
            )
        for trajectory in group.trajectories:
            problems += _trajectory_problems(group, trajectory, shapes)
            for step in trajectory.steps:
                where = f"group {group.id}, trajectory {trajectory.index}, step {step.index}"
                problems += [
                    f"{where}: {problem}" for problem in _model_problems(step, vocab, experts)
                ]
    if len(shapes) > 1:
        problems.append(
            "experts: one shape and dtype per batch, found "
            + "; ".join(
                f"{layers} layers × {top_k} {dtype} in {where}"
                for (layers, top_k, dtype), where in shapes.items()
            )
        )
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
            shapes.setdefault(
                (*step.routing.shape[1:], str(step.routing.dtype)), f"{where}, step {step.index}"
            )
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
            problems.append(
                f"{where}, step {step.index}: experts begin at token {start}, and earlier steps have "
                f"recorded {known} tokens of its prompt"
            )
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
    prompt = common_prefix(step.prompt_ids, ids)
    if prompt < len(step.prompt_ids):
        return prompt
    return prompt + common_prefix(step.response_ids, ids[prompt:])


_COLUMNS = {
    "prompt_ids": np.dtype(np.int32),
    "response_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(bool),
    "logprobs": np.dtype(np.float32),
}


def _step_problems(step: Step) -> list[str]:
    problems = _array_problems(step)
    if not problems and step.logprobs is not None:
        wrong = _wrong_logprob(step)
        if wrong is not None:
            problems.append(
                f"logprobs holds {wrong} for a trained token; finite numbers of at most 0 are needed, or "
                "no array where none were recorded"
            )
    if not len(step.prompt_ids):
        problems.append(
            "prompt_ids is empty; the first response token needs a token that predicts it"
        )
    problems += _version_problems(step)
    if step.finish not in list(FinishReason):
        problems.append(f"finish is {step.finish!r}; one of {', '.join(FinishReason)} is needed")
    return problems + ([] if step.routing is None else _routing_problems(step))


def _array_problems(step: Step) -> list[str]:
    response = len(step.response_ids)
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
            if len(array) != response:
                problems.append(f"{name} has {len(array)} entries for {response} response tokens")
        elif array.min(initial=0) < 0:
            problems.append(f"{name} holds the negative id {array.min()}")
    return problems


def _version_problems(step: Step) -> list[str]:
    versions, response = step.versions, len(step.response_ids)
    if versions.dtype != np.int32 or versions.ndim != 2 or versions.shape[1] != 2:
        return [
            f"versions is {versions.dtype} {list(versions.shape)}; int32 rows (version, tokens) are needed"
        ]
    covered = int(versions[:, 1].sum())
    if versions.min(initial=0) < 0:
        return [f"versions holds the negative number {versions.min()}"]
    return (
        [] if covered == response else [f"versions cover {covered} of {response} response tokens"]
    )


def _wrong_logprob(step: Step) -> float | None:
    """One of a trained token that cannot be a logprob. Those of other tokens mean nothing."""
    logprobs = step.logprobs
    if (
        logprobs.min(initial=0) > -np.inf and logprobs.max(initial=0) <= MAX_LOGPROB
    ):  # neither is true of NaN
        return None  # most steps need no closer look
    trained = logprobs[step.loss_mask]
    bad = trained[~(np.isfinite(trained) & (trained <= MAX_LOGPROB))]
    return float(bad[0]) if len(bad) else None


def _routing_problems(step: Step) -> list[str]:
    routing = step.routing
    if routing.ndim != 3 or routing.dtype not in (np.uint8, np.int16):
        return [
            f"routing is {routing.dtype} with {routing.ndim} axes; uint8 or int16 [tokens, layers, k] is needed"
        ]
    trained = np.flatnonzero(step.loss_mask)
    # The source of the last trained token must have its experts; what comes after may (an appended EOS has none).
    need = len(step.prompt_ids) + int(trained[-1]) if len(trained) else 0
    most = max(len(step) - 1, 0)
    problems = []
    if not 0 <= step.routing_start <= len(step.prompt_ids):
        prompt = len(step.prompt_ids)
        problems.append(
            f"routing_start is {step.routing_start}; it must lie in 0 to {prompt}, the prompt"
        )
    if not need <= step.routing_end <= most:
        problems.append(
            f"routing ends before token {step.routing_end}; its end must lie in {need} to {most}"
        )
    return problems


def _model_problems(step: Step, vocab: int | None, shape: ExpertShape | None) -> list[str]:
    """What the model could not have made."""
    problems = []
    for name in ("prompt_ids", "response_ids"):
        ids = getattr(step, name)
        if vocab is not None and ids.size and ids.max() >= vocab:
            problems.append(
                f"{name} holds the id {ids.max()}; the model's vocabulary ends at {vocab - 1}"
            )
    if shape is not None and step.loss_mask.any():
        problem = _experts_problem(step, shape)
        problems += [] if problem is None else [problem]
    return problems


def _experts_problem(step: Step, shape: ExpertShape) -> str | None:
    routing = step.routing
    if routing is None:
        return "no experts recorded, and routing_replay.enabled needs them"
    layers = len(shape.moe_layers)
    if routing.ndim != 3 or routing.shape[1:] != (layers, shape.top_k):
        return f"experts of shape {list(routing.shape)}; the model has [tokens, {layers} layers, top {shape.top_k}]"
    chosen = routing if all(shape.moe_layers) else routing[:, np.array(shape.moe_layers)]
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < shape.experts:
        bad = chosen.min() if chosen.min() < 0 else chosen.max()
        return f"expert {bad} recorded; the model has 0 to {shape.experts - 1}"
    for other in range(
        1, shape.top_k
    ):  # every pair, a column at a time: no sorted copy of all experts
        twice = chosen[..., other:] == chosen[..., :-other]
        if twice.any():
            token, layer, _ = np.argwhere(twice)[0].tolist()
            return f"token {step.routing_start + token} has one expert twice in the model's MoE layer {layer}"
    return None
