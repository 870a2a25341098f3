"""The nearest config that fits: the fewest and smallest changes to what the user wrote."""

import copy
import math
from collections.abc import Iterator
from itertools import product

from megastep.architecture import Architecture, read_architecture
from megastep.config import Config, validate, value_of
from megastep.plan.planning import Plan, make_plan
from megastep.plan.shares import Share, shares

Change = dict[str, object]  # values by key
SIZES = (1, 2, 4, 8, 16, 32)  # tensor parallelism stays inside a node, of eight GPUs


def suggest(config: Config, gpu_gib: float, trajectory_tokens: int | None) -> tuple[Change, Plan] | None:
    """What to change, and the plan then; None: nothing that is tried fits, four times the GPUs included."""
    arch = read_architecture(config.model.path)
    known: dict[str, list[Share]] = {}  # of each layout
    valid: dict[str, bool] = {}  # of each layout and budget: nothing else that is changed can make a config invalid
    for change in sorted(_changes(config, arch), key=lambda change: _cost(config, change)):
        changed = _with(config, change)
        layout = f"{changed.policy.parallel} {changed.policy.ranks}"
        key = f"{layout} {changed.train.micro_batch_tokens}"
        if key not in valid:
            valid[key] = not validate(changed, has_cuda=True)
        if not valid[key]:
            continue
        if layout not in known:
            known[layout] = shares(changed, arch)
        plan = make_plan(changed, gpu_gib, trajectory_tokens, known[layout])
        if not plan.troubles():
            return change, plan
    return None


def _changes(config: Config, arch: Architecture) -> Iterator[Change]:
    """Every combination of the settings that memory depends on."""
    experts = SIZES if arch.experts else (1,)
    budgets = [config.train.micro_batch_tokens // n for n in (1, 2, 4)]
    recompute = [config.policy.recompute, ["full"]]
    offload = [config.optimizer.offload_fraction, 1.0]
    shares_of_gpu = [config.engine.gpu_memory, 0.5, 0.7, 0.8, 0.9]
    for times, tensor, pipeline, expert in product((1, 2, 4), SIZES[:4], SIZES[:5], experts):
        layout = _layout(config, arch, config.policy.ranks * times, tensor, pipeline, expert)
        for budget, again, fraction, share in product(budgets, recompute, offload, shares_of_gpu):
            yield _differing(config, layout | {
                "train.micro_batch_tokens": budget, "policy.recompute": again, "engine.gpu_memory": share,
                "optimizer.offload_fraction": fraction,
            })


def _layout(config: Config, arch: Architecture, ranks: int, tensor: int, pipeline: int, expert: int) -> Change:
    p = config.policy.parallel
    even = arch.layers % (pipeline * p.virtual) == 0
    stages = p.layers_per_stage if pipeline == p.pipeline else None if even else uneven(arch.layers, pipeline)
    return {"policy.ranks": ranks, "policy.parallel.tensor": tensor, "policy.parallel.pipeline": pipeline,
            "policy.parallel.expert": expert, "policy.parallel.layers_per_stage": stages}


def uneven(layers: int, stages: int) -> list[int]:
    """Fewer layers at the ends, where the embedding and the head are."""
    few, longer = divmod(layers, stages)
    first = -(-(stages - longer) // 2)
    return [few + (first <= stage < first + longer) for stage in range(stages)]


def _differing(config: Config, change: Change) -> Change:
    return {key: value for key, value in change.items() if value != value_of(config, key)}


def _cost(config: Config, change: Change) -> float:
    """Doublings of the layout, and what the others cost in speed."""
    cost = 0.0
    for key, value in change.items():
        if key in ("policy.parallel.tensor", "policy.parallel.pipeline", "policy.parallel.expert"):
            cost += abs(math.log2(value / value_of(config, key)))
        elif key == "train.micro_batch_tokens":
            cost += 0.7 * math.log2(value_of(config, key) / value)
        elif key == "policy.ranks":
            cost += 5 * math.log2(value / value_of(config, key))
        else:
            cost += {"policy.recompute": 1.0, "optimizer.offload_fraction": 2.5, "engine.gpu_memory": 0.5}.get(key, 0.0)
    return cost


def _with(config: Config, change: Change) -> Config:
    changed = copy.deepcopy(config)
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        setattr(value_of(changed, section), name, value)
    return changed

