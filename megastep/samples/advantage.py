"""Advantage estimators: one advantage per step, independent of the pack layout.

    estimator      advantage of step t of trajectory i         statistics over
    grpo           (Rᵢ − mean R) / (std R + ε)                 the trajectories of the group
    grpo_nostd     Rᵢ − mean R                                 the trajectories of the group
    rloo           Rᵢ − mean of the others' R                  the trajectories of the group
    maxrl          (Rᵢ − mean R) / (mean R + ε)                the trajectories of the group
    step_returns   Gᵢₜ − mean Gₜ                               the trajectories with a step t
    gigpo          grpo + w · (Gᵢₜ − mean G) / (std G + ε)     and the steps from the same state

R is a trajectory's total reward, G the discounted reward from a step on. An outcome estimator gives
all steps of a trajectory the same advantage; each step's loss mask selects its tokens (see
trie.py). A trajectory counts once, independent of its number of steps.

In a degenerate group, of one trajectory or of equal rewards, the advantage is exactly 0. Rewards
are equal up to rounding (`degenerate`): 0.1 + 0.2 and 0.3 are the same reward. The ε in a
denominator is 1e-6, as in verl's and verl-agent's implementations of GRPO and GiGPO; the papers
have none. A reward that is not finite is an error here; `filters.finite_rewards` drops such
trajectories.

Left out: `gae` and `reinforce++`. They assign a value per token across the steps of a trajectory,
which one advantage per step cannot represent.
"""

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from megastep.config.schema import OUTCOME_ESTIMATORS, estimator_problem
from megastep.errors import RolloutError
from megastep.types import Group, Step

EPSILON = 1e-6  # in the denominators
# Relative; environments often compute rewards in float32.
TOLERANCE = float(np.finfo(np.float32).eps)


def advantages(
    group: Group, estimator: str, gamma: float = 1.0, step_coef: float = 1.0
) -> list[np.ndarray]:
    """One array [steps] f32 per trajectory."""
    problem = estimator_problem(estimator)
    if problem:
        raise ValueError(f"advantage.estimator = {estimator}: {problem}")
    rewards, sizes = outcomes(group)
    _check_rewards(group, estimator, rewards)
    if estimator in OUTCOME_ESTIMATORS:
        per_trajectory = _compare(_OUTCOME[estimator], rewards, sizes)
        return [
            np.full(len(trajectory.steps), advantage, np.float32)
            for trajectory, advantage in zip(group.trajectories, per_trajectory)
        ]
    returns = []
    return_sizes = []
    for trajectory in group.trajectories:
        step_rewards = [s.reward for s in trajectory.steps]
        returns.append(discounted_returns(step_rewards, gamma))
        return_sizes.append(discounted_returns([abs(r) for r in step_rewards], gamma))
    if estimator == "step_returns":
        return step_returns(returns, return_sizes)
    states = [[_state(s) for s in t.steps] for t in group.trajectories]
    episode = _compare(grpo, rewards, sizes)
    return gigpo(episode, returns, return_sizes, states, step_coef)


def _check_rewards(group: Group, estimator: str, rewards: np.ndarray) -> None:
    for trajectory, reward in zip(group.trajectories, rewards):
        if not np.isfinite(reward):
            where = f"group {group.id}, trajectory {trajectory.index}"
            raise RolloutError(f"{where}: reward is {reward}, must be finite")
    if estimator == "maxrl" and rewards.min(initial=0) < 0:
        raise RolloutError(
            "advantage.estimator = maxrl: needs rewards of 0 or more, "
            f"got {rewards.min()} in group {group.id}"
        )


def outcomes(group: Group) -> tuple[np.ndarray, np.ndarray]:
    """[trajectory] f64: the reward, and the sum of the absolute rewards of the steps."""
    rewards = [t.reward for t in group.trajectories]
    sizes = [sum(abs(s.reward) for s in t.steps) for t in group.trajectories]
    return np.array(rewards, np.float64), np.array(sizes, np.float64)


def degenerate(values: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether there are fewer than two values, or all are equal up to rounding.

    sizes [n]: the sum of the absolute rewards that each value is the sum of. Rounding is relative
    to these, not to the values: 0.1 + 0.2 - 0.3 is 0. All values are equal if one number is within
    the rounding of each.
    """
    rounding = TOLERANCE / 2 * sizes
    return len(values) < 2 or bool((values - rounding).max() <= (values + rounding).min())


def _compare(
    formula: Callable[[np.ndarray], np.ndarray], values: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """The formula's advantages; exactly 0 in a degenerate group."""
    return np.zeros_like(values) if degenerate(values, sizes) else formula(values)


# ---------------------------------------------------------------- outcome rewards: [n] → [n]


def grpo(rewards: np.ndarray) -> np.ndarray:
    """(R − mean) / (std + ε), with the sample deviation (n − 1).

    Shao et al. 2024, DeepSeekMath, section 4.1.2.
    """
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


def grpo_nostd(rewards: np.ndarray) -> np.ndarray:
    """R − mean. Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO)."""
    return rewards - rewards.mean()


def rloo(rewards: np.ndarray) -> np.ndarray:
    """R − mean of the others = n / (n − 1) · (R − mean). Ahmadian et al. 2024, Back to Basics."""
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


def maxrl(rewards: np.ndarray) -> np.ndarray:
    """(R − mean) / (mean + ε), for rewards of 0 or more.

    Tajwar et al. 2026, Maximum Likelihood RL.
    """
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
    """Gᵢₜ − mean over the trajectories with a step t.

    REINFORCE with a baseline per turn (Williams 1992); grpo_nostd for trajectories of one step.
    """
    result = [np.zeros(len(r), np.float32) for r in returns]
    for t in range(max(map(len, returns), default=0)):
        members = [(i, t) for i, r in enumerate(returns) if t < len(r)]
        advantages_at_t = _compare(grpo_nostd, _at(members, returns), _at(members, sizes))
        for (i, _), advantage in zip(members, advantages_at_t):
            result[i][t] = advantage
    return result


def gigpo(
    episode: np.ndarray,
    returns: list[np.ndarray],
    sizes: list[np.ndarray],
    states: list[list],
    step_coef: float,
) -> list[np.ndarray]:
    """A_episode + w · A_step; A_step compares the returns of steps from the same state.

    Feng et al. 2025, Group-in-Group Policy Optimization, eq. 3 to 8.
    """
    result = [np.full(len(r), a, np.float64) for r, a in zip(returns, episode)]
    anchors = defaultdict(list)  # state → the (trajectory, step) from it
    for i, trajectory_states in enumerate(states):
        for t, state in enumerate(trajectory_states):
            anchors[state].append((i, t))
    for members in anchors.values():
        state_advantages = _compare(grpo, _at(members, returns), _at(members, sizes))
        for (i, t), advantage in zip(members, state_advantages):
            result[i][t] += step_coef * advantage
    return [r.astype(np.float32) for r in result]


def _at(members: list[tuple[int, int]], per_step: list[np.ndarray]) -> np.ndarray:
    """[member] the values at these (trajectory, step)."""
    return np.array([per_step[i][t] for i, t in members])


def _state(step: Step) -> bytes | int:
    return step.prompt_ids.tobytes() if step.state is None else step.state
