"""Weights: the factor of each trained token in the loss, computed over the whole mini-batch.

    reduction    weight of a token                               equal weight for
    token        1 / tokens                                      every token
    step         1 / steps / tokens of its step                  every model call
    trajectory   1 / trajectories / tokens of its trajectory     every trajectory
    prompt       1 / prompts / tokens of its prompt              every prompt

Only trained tokens count, and only steps, trajectories and prompts that have one. The weights of a
mini-batch sum to 1, for any number of ranks and micro-batches; the loss is the sum of weight × loss
over the tokens.
"""

import numpy as np

from megastep.types import Group

UNITS = ("token", "step", "trajectory", "prompt")


def token_weights(groups: list[Group], reduction: str) -> list[list[np.ndarray]]:
    """Per group, per trajectory: [step] f32, the weight of each trained token of the step."""
    if reduction not in UNITS:
        raise ValueError(f"loss.reduction = {reduction}: must be one of {', '.join(UNITS)}")
    trajectories = [t for group in groups for t in group.trajectories]
    steps = [step for t in trajectories for step in t.steps]
    tokens = np.array([np.count_nonzero(step.loss_mask) for step in steps], np.float64)  # [step]
    unit = _units(groups, reduction)  # [step]
    unit_tokens = np.bincount(unit, tokens)  # [unit] trained tokens
    trained_units = np.count_nonzero(unit_tokens)
    weight = np.zeros(len(tokens))  # [step]
    trained = tokens > 0
    weight[trained] = 1 / (trained_units * unit_tokens[unit[trained]])
    return _nest(weight.astype(np.float32), groups)


def _units(groups: list[Group], reduction: str) -> np.ndarray:
    """[step] the number of the unit it belongs to, in the order of the batch."""
    trajectories = [t for group in groups for t in group.trajectories]
    steps_of_trajectory = [len(t.steps) for t in trajectories]
    if reduction == "token":
        return np.zeros(sum(steps_of_trajectory), int)
    if reduction == "step":
        return np.arange(sum(steps_of_trajectory))
    if reduction == "trajectory":
        return np.repeat(np.arange(len(trajectories)), steps_of_trajectory)
    steps_of_prompt = [sum(len(t.steps) for t in group.trajectories) for group in groups]
    return np.repeat(np.arange(len(groups)), steps_of_prompt)


def _nest(per_step: np.ndarray, groups: list[Group]) -> list[list[np.ndarray]]:
    """Slices of a flat array [step], per group and trajectory."""
    nested: list[list[np.ndarray]] = []
    start = 0
    for group in groups:
        nested.append([])
        for trajectory in group.trajectories:
            stop = start + len(trajectory.steps)
            nested[-1].append(per_step[start:stop])
            start = stop
    return nested
