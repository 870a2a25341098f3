"""The nearest config that fits: the fewest and smallest changes to the given one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from megastep.config import Config, validate, value_of
from megastep.models.architecture import Architecture, read_architecture
from megastep.plan.model_states import ModelStates, model_states
from megastep.plan.planning import GIB, RESERVE_GIB, Plan, engine_memory, make_plan, parameters
from megastep.policy.model import PRECISIONS

Change = dict[str, Any]  # values by key
Section = TypeVar("Section")  # a config, or a section of it

SIZES = (1, 2, 4, 8, 16, 32)
NODE_SIZES = (1, 2, 4, 8)  # GPUs: tensor parallelism stays inside a node

# The cost of a change: per doubling or halving of a size, or once for other settings.
COST_PER_DOUBLING = {
    "policy.parallel.tensor": 1.0,
    "policy.parallel.pipeline": 1.0,
    "policy.parallel.expert": 1.0,
    "policy.ranks": 5.0,
    "engine.tensor_parallel": 1.0,
    "train.micro_batch_tokens": 0.7,
}
COST = {
    "policy.recompute": 1.0,
    "optimizer.cpu_offload_fraction": 2.5,
    "engine.gpu_memory_utilization": 0.5,
}


@dataclass(frozen=True)
class Candidate:
    policy: int  # number of its policy change
    change: Change  # of policy and engines
    cost: float


def suggest(
    config: Config, gpu_gib: float, trajectory_tokens: int | None
) -> tuple[Change, Plan] | None:
    """The cheapest change with which the config fits, and its plan; None: no candidate fits.

    A policy change with which training does not fit is not tried with other engines. Example,
    Qwen3-30B-A3B with contexts of 16384 tokens on 16 GPUs:

        cost   change
        0      none                               training does not fit
        0.7    train.micro_batch_tokens=8192      invalid: less than the longest call
        1.0    policy.parallel.pipeline=1         training does not fit
        1.0    policy.parallel.expert=4           training does not fit
        1.0    policy.recompute=[full]            fits: the result
    """
    planner = _Planner(config, gpu_gib, trajectory_tokens)
    rejected: set[int] = set()  # policy changes: invalid, or training does not fit
    for candidate in _candidates(config, gpu_gib):
        if candidate.policy in rejected:
            continue  # with any engines
        plan = planner.plan(candidate.change)
        if plan is None or not plan.training_fits:
            rejected.add(candidate.policy)
        elif not plan.problems():
            return candidate.change, plan
    return None


def _candidates(config: Config, gpu_gib: float) -> list[Candidate]:
    """Every policy change with every engine change, the cheapest first."""
    engine_changes = _engine_changes(config, gpu_gib)
    if not engine_changes:
        return []
    candidates = []
    for number, policy_change in enumerate(_policy_changes(config)):
        policy_cost = _cost(config, policy_change)
        for engine_change in engine_changes:
            cost = policy_cost + _cost(config, engine_change)
            candidates.append(Candidate(number, policy_change | engine_change, cost))
    return sorted(candidates, key=lambda candidate: candidate.cost)


class _Planner:
    """Plans of changed configs. Model states, which take a second, are kept by parallel layout."""

    def __init__(self, config: Config, gpu_gib: float, trajectory_tokens: int | None):
        self.config = config
        self.arch = read_architecture(config.model.path)
        self.gpu_gib = gpu_gib
        self.trajectory_tokens = trajectory_tokens
        self._states: dict[str, list[ModelStates]] = {}

    def plan(self, change: Change) -> Plan | None:
        """None: the changed config is invalid, or even a lower bound of its memory does not fit."""
        config = _with(self.config, change)
        if validate(config, has_cuda=True) or _least_gib(config, self.arch) > self.gpu_gib:
            return None
        parallel_layout = f"{config.policy.parallel} {config.policy.ranks}"
        if parallel_layout not in self._states:
            self._states[parallel_layout] = model_states(config, self.arch)
        return make_plan(
            config, self.gpu_gib, self.trajectory_tokens, self._states[parallel_layout]
        )


def _least_gib(config: Config, arch: Architecture) -> float:
    """A lower bound for the fullest stage: model states sharded perfectly, and the reserve."""
    p = config.policy.parallel
    itemsize = PRECISIONS[config.policy.precision].itemsize
    optimizer = (12 if itemsize == 2 else 8) * (1 - config.optimizer.cpu_offload_fraction)
    weights_and_gradients = (itemsize + 4) / (p.tensor * p.pipeline * p.expert)
    per_parameter = weights_and_gradients + optimizer / config.policy.ranks
    return parameters(arch) * per_parameter / GIB + RESERVE_GIB


# ---------------------------------------------------------------- changes


def _engine_changes(config: Config, gpu_gib: float) -> list[Change]:
    """For each GPU memory utilization, the cheapest change with which a call fits.

    The number of GPUs stays the same.
    """
    engine = config.engine
    gpus = engine.num_engines * engine.tensor_parallel
    reserve_gib = RESERVE_GIB if config.cluster.colocate else 0.0
    cheapest: dict[float, Change] = {}
    for utilization, tensor in product(
        {engine.gpu_memory_utilization, 0.5, 0.7, 0.8, 0.9},
        sorted({*NODE_SIZES, engine.tensor_parallel}),
    ):
        if gpus % tensor or utilization * gpu_gib + reserve_gib > gpu_gib:
            continue
        change = _differing(
            config,
            {
                "engine.tensor_parallel": tensor,
                "engine.num_engines": gpus // tensor,
                "engine.gpu_memory_utilization": utilization,
            },
        )
        changed = _with(config, change)
        if validate(changed, has_cuda=True) or not engine_memory(changed, gpu_gib).holds_a_call:
            continue
        known = cheapest.get(utilization)
        if known is None or _cost(config, change) < _cost(config, known):
            cheapest[utilization] = change
    return list(cheapest.values())


def _policy_changes(config: Config) -> Iterator[Change]:
    """Every combination of the policy's settings that memory depends on, up to 4 times the GPUs."""
    budgets_tokens = [config.train.micro_batch_tokens // n for n in (1, 2, 4)]
    recompute = [config.policy.recompute]
    if config.policy.recompute != ["full"]:
        recompute.append(["full"])
    offload = {config.optimizer.cpu_offload_fraction, 1.0}
    for layout in _layout_changes(config):
        for budget_tokens, modules, fraction in product(budgets_tokens, recompute, offload):
            settings = {
                "train.micro_batch_tokens": budget_tokens,
                "policy.recompute": modules,
                "optimizer.cpu_offload_fraction": fraction,
            }
            yield _differing(config, layout | settings)


def _layout_changes(config: Config) -> Iterator[Change]:
    """Parallel layouts that divide the ranks; validate() checks the rest."""
    arch = read_architecture(config.model.path)
    p = config.policy.parallel
    tensors = sorted({*NODE_SIZES, p.tensor})
    pipelines = sorted({*SIZES[:5], p.pipeline})
    experts = sorted({*SIZES, p.expert}) if arch.experts else [1]
    for times, tensor, pipeline, expert in product((1, 2, 4), tensors, pipelines, experts):
        ranks = config.policy.ranks * times
        if ranks % (tensor * pipeline) == 0 and ranks % (expert * pipeline) == 0:
            yield {
                "policy.ranks": ranks,
                "policy.parallel.tensor": tensor,
                "policy.parallel.pipeline": pipeline,
                "policy.parallel.expert": expert,
                "policy.parallel.layers_per_stage": _layers_per_stage(config, arch, pipeline),
            }


def _layers_per_stage(config: Config, arch: Architecture, pipeline: int) -> list[int] | None:
    """The given split if the number of stages stays; None: an even one."""
    p = config.policy.parallel
    if pipeline == p.pipeline:
        return p.layers_per_stage
    chunks = pipeline * p.virtual
    return None if arch.layers % chunks == 0 else uneven(arch.layers, chunks)


def uneven(layers: int, stages: int) -> list[int]:
    """Layers per stage, fewer at the ends, next to the embedding and the head.

    Example: 48 layers in 5 stages are [9, 10, 10, 10, 9].
    """
    fewer, longer_stages = divmod(layers, stages)
    first = -(-(stages - longer_stages) // 2)
    return [fewer + (first <= stage < first + longer_stages) for stage in range(stages)]


def _differing(config: Config, change: Change) -> Change:
    return {key: value for key, value in change.items() if value != value_of(config, key)}


def _cost(config: Config, change: Change) -> float:
    cost = 0.0
    for key, value in change.items():
        if key in COST_PER_DOUBLING:
            cost += COST_PER_DOUBLING[key] * abs(math.log2(value / value_of(config, key)))
        else:
            cost += COST.get(key, 0.0)
    return cost


def _with(section: Section, change: Change) -> Section:
    """A copy with the changed values; unchanged sections are shared with the original."""
    values: Change = {}
    nested: dict[str, Change] = {}
    for key, value in change.items():
        name, _, rest = key.partition(".")
        if rest:
            nested.setdefault(name, {})[rest] = value
        else:
            values[name] = value
    for name, inner in nested.items():
        values[name] = _with(getattr(section, name), inner)
    return replace(section, **values)  # type: ignore[type-var]
