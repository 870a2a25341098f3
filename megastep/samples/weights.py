"""Weight: how much each trained token counts in the loss, decided over the whole mini-batch and before any layout.

    reduction    weight of a token                               so that
    token        1 / tokens                                      every token counts the same
    step         1 / steps / tokens of its step                  every model call counts the same
    trajectory   1 / trajectories / tokens of its trajectory     every episode counts the same
    prompt       1 / prompts / tokens of its prompt              every prompt counts the same

Only trained tokens are counted, and only the steps, trajectories and prompts that have one. The weights of a
mini-batch add up to 1, on however many ranks and in however many micro-batches it is computed; the loss is the plain
sum of weight × loss of the token.
"""

import numpy as np

from megastep.types import Group

UNITS = ("token", "step", "trajectory", "prompt")


def token_weights(groups: list[Group], reduction: str) -> list[list[np.ndarray]]:
    """Per group, per trajectory: the weight of each trained token of each step."""
    if reduction not in UNITS:
        raise ValueError(f"loss.reduction = {reduction}: must be one of {', '.join(UNITS)}")
    # [step] in the order of the batch: trained tokens, and which trajectory and prompt they belong to
    tokens, trajectory, prompt = [], [], []
    for g, group in enumerate(groups):
        for t in group.trajectories:
            number = trajectory[-1] + 1 if trajectory else 0
            tokens += [np.count_nonzero(step.loss_mask) for step in t.steps]
            trajectory += [number] * len(t.steps)
            prompt += [g] * len(t.steps)
    tokens = np.array(tokens, np.float64)
    unit = {
        "token": np.zeros(len(tokens), int),
        "step": np.arange(len(tokens)),
        "trajectory": np.array(trajectory, int),
        "prompt": np.array(prompt, int),
    }[reduction]
    per_unit = np.bincount(unit, tokens)  # [unit] trained tokens
    units = np.count_nonzero(per_unit)
    weight = (
        1 / (units * np.where(tokens > 0, per_unit[unit], np.inf))
        if units
        else np.zeros(len(tokens))
    )
    return _nest(weight.astype(np.float32), groups)


def _nest(per_step: np.ndarray, groups: list[Group]) -> list[list[np.ndarray]]:
    result, at = [], 0
    for group in groups:
        result.append([])
        for trajectory in group.trajectories:
            result[-1].append(per_step[at : at + len(trajectory.steps)])
            at += len(trajectory.steps)
    return result
