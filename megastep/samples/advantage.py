"""Credit: one advantage per step, decided before any layout.

    estimator      advantage of step t of trajectory i              statistics over
    grpo           (Rᵢ − mean R) / (std R + ε)                      the trajectories of the group
    grpo_nostd     Rᵢ − mean R                                      the trajectories of the group
    rloo           Rᵢ − mean of the others' R                       the trajectories of the group
    maxrl          (Rᵢ − mean R) / (mean R + ε)                     the trajectories of the group
    step_returns   Gᵢₜ − mean Gₜ                                    the trajectories that took a step t
    gigpo          grpo + w · (Gᵢₜ − mean G) / (std G + ε)          ... and the steps that began in the same state

R is a trajectory's total reward, G the discounted reward from a step on. An outcome estimator gives every step of a
trajectory the same number; where it lands is decided by each step's own loss mask (see trie.py). A trajectory counts
once, however many steps it took.

Degenerate groups are defined: where there is nobody to compare with, or all are equal, the advantage is exactly 0.
Equal means up to rounding (`degenerate`): 0.1 + 0.2 and 0.3 are the same reward. The ε in a denominator is 1e-6, as in
verl's and verl-agent's implementations of GRPO and GiGPO; the papers have none. A reward that is not finite is an error
here; `filters.finite_rewards` drops such trajectories and says so.

Left out: `gae` and `reinforce++`. They give every token its own value across the steps of a trajectory, which one
number per step cannot carry.
"""

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from megastep.errors import RolloutError
from megastep.types import Group, Step

OUTCOME = ("grpo", "grpo_nostd", "rloo", "maxrl")
STEPWISE = ("step_returns", "gigpo")
TEMPORAL = ("gae", "reinforce++")
EPSILON = 1e-6  # in the denominators
TOLERANCE = float(
    np.finfo(np.float32).eps
)  # relative; environments often compute rewards in float32


def check_estimator(name: str) -> str | None:
    """What is wrong with this choice of estimator, or None."""
    if name in OUTCOME + STEPWISE:
        return None
    if name in TEMPORAL:
        return (
            "temporal estimators give per-token values across steps, which one advantage per step cannot represent; "
            f"use one of {', '.join(OUTCOME)}, or with rewards per step {', '.join(STEPWISE)}"
        )
    return f"must be one of {', '.join(OUTCOME + STEPWISE)}"


def advantages(
    group: Group, estimator: str, gamma: float = 1.0, step_coef: float = 1.0
) -> list[np.ndarray]:
    """One array per trajectory, one number per step."""
    problem = check_estimator(estimator)
    if problem:
        raise ValueError(f"advantage.estimator = {estimator}: {problem}")
    rewards, sizes = outcomes(group)
    for trajectory, reward in zip(group.trajectories, rewards):
        if not np.isfinite(reward):
            raise RolloutError(
                [
                    f"group {group.id}, trajectory {trajectory.index}: reward is {reward}, must be finite"
                ]
            )
    if estimator == "maxrl" and rewards.min(initial=0) < 0:
        raise RolloutError(
            [
                f"advantage.estimator = maxrl: needs rewards of 0 or more, got {rewards.min()} in group {group.id}"
            ]
        )
    if estimator in OUTCOME:
        per_trajectory = _compare(_OUTCOME[estimator], rewards, sizes)
        return [
            np.full(len(t.steps), a, np.float32) for t, a in zip(group.trajectories, per_trajectory)
        ]
    returns, return_sizes = [], []
    for trajectory in group.trajectories:
        step_rewards = [s.reward for s in trajectory.steps]
        returns.append(discounted_returns(step_rewards, gamma))
        return_sizes.append(discounted_returns([abs(r) for r in step_rewards], gamma))
    if estimator == "step_returns":
        return step_returns(returns, return_sizes)
    states = [[_state(s) for s in t.steps] for t in group.trajectories]
    episode = _compare(grpo, rewards, sizes)
    return gigpo(episode, returns, return_sizes, states, step_coef)


def outcomes(group: Group) -> tuple[np.ndarray, np.ndarray]:
    """The reward of each trajectory, and the sum of the absolute rewards of its steps."""
    rewards = np.array([t.reward for t in group.trajectories], np.float64)
    return rewards, np.array(
        [sum(abs(s.reward) for s in t.steps) for t in group.trajectories], np.float64
    )


def degenerate(values: np.ndarray, sizes: np.ndarray) -> bool:
    """Nothing to compare: fewer than two, or all equal up to rounding.

    `sizes` [n]: the sum of the absolute rewards that each value was added up from. Rounding is relative to these, not
    to the values: 0.1 + 0.2 - 0.3 is 0. All are equal if one number lies within the rounding of each.
    """
    rounding = TOLERANCE / 2 * sizes
    return len(values) < 2 or bool((values - rounding).max() <= (values + rounding).min())


def _compare(
    formula: Callable[[np.ndarray], np.ndarray], values: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """The formula's advantages; exactly 0 where there is nothing to compare."""
    return np.zeros_like(values) if degenerate(values, sizes) else formula(values)


# ---------------------------------------------------------------- outcome rewards: [n] → [n]


def grpo(rewards: np.ndarray) -> np.ndarray:
    """(R − mean) / (std + ε), the sample deviation (n − 1). Shao et al. 2024, DeepSeekMath, section 4.1.2."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


def grpo_nostd(rewards: np.ndarray) -> np.ndarray:
    """R − mean. Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO)."""
    return rewards - rewards.mean()


def rloo(rewards: np.ndarray) -> np.ndarray:
    """R − mean of the others = n / (n − 1) · (R − mean). Ahmadian et al. 2024, Back to Basics."""
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


def maxrl(rewards: np.ndarray) -> np.ndarray:
    """(R − mean) / (mean + ε), for rewards that are not negative. Tajwar et al. 2026, Maximum Likelihood RL."""
    return (rewards - rewards.mean()) / (rewards.mean() + EPSILON)


_OUTCOME = {"grpo": grpo, "grpo_nostd": grpo_nostd, "rloo": rloo, "maxrl": maxrl}


# ---------------------------------------------------------------- rewards per step


def discounted_returns(rewards: list[float], gamma: float) -> np.ndarray:
    """Gₜ = rₜ + gamma · Gₜ₊₁."""
    returns = np.zeros(len(rewards) + 1)
    for t in range(len(rewards) - 1, -1, -1):
        returns[t] = rewards[t] + gamma * returns[t + 1]
    return returns[:-1]


def step_returns(returns: list[np.ndarray], sizes: list[np.ndarray]) -> list[np.ndarray]:
    """Gᵢₜ − mean over the trajectories that took a step t: REINFORCE with a baseline per turn (Williams 1992).

    With trajectories of one step it is grpo_nostd.
    """
    result = [np.zeros(len(r), np.float32) for r in returns]
    for t in range(max(map(len, returns), default=0)):
        members = [(i, t) for i, r in enumerate(returns) if t < len(r)]
        for (i, _), advantage in zip(
            members, _compare(grpo_nostd, _at(members, returns), _at(members, sizes))
        ):
            result[i][t] = advantage
    return result


def gigpo(
    episode: np.ndarray,
    returns: list[np.ndarray],
    sizes: list[np.ndarray],
    states: list[list],
    step_coef: float,
) -> list[np.ndarray]:
    """A_episode + w · A_step; A_step compares the returns of steps that began in the same state.

    Feng et al. 2025, Group-in-Group Policy Optimization, eq. 3 to 8.
    """
    result = [np.full(len(r), a, np.float64) for r, a in zip(returns, episode)]
    anchors = defaultdict(list)  # state → the (trajectory, step) that began there
    for i, trajectory_states in enumerate(states):
        for t, state in enumerate(trajectory_states):
            anchors[state].append((i, t))
    for members in anchors.values():
        for (i, t), advantage in zip(
            members, _compare(grpo, _at(members, returns), _at(members, sizes))
        ):
            result[i][t] += step_coef * advantage
    return [r.astype(np.float32) for r in result]


def _at(members: list[tuple[int, int]], per_step: list[np.ndarray]) -> np.ndarray:
    """The numbers of these (trajectory, step)."""
    return np.array([per_step[i][t] for i, t in members])


def _state(step: Step):
    return step.prompt_ids.tobytes() if step.state is None else step.state
