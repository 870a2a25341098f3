"""The nearest config that fits: the fewest and smallest changes to what the user wrote."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from megastep.config import Config, validate, value_of
from megastep.models.architecture import Architecture, read_architecture
from megastep.plan.planning import GIB, RESERVE_GIB, Plan, engine_share, make_plan, parameters
from megastep.plan.shares import Share, shares
from megastep.policy.model import PRECISIONS

Change = dict[str, object]  # values by key
SIZES = (1, 2, 4, 8, 16, 32)
IN_A_NODE = (1, 2, 4, 8)  # GPUs: where tensor parallelism stays


def suggest(
    config: Config, gpu_gib: float, trajectory_tokens: int | None
) -> tuple[Change, Plan] | None:
    """What to change, and the plan then; None: nothing that is tried fits, four times the GPUs included."""
    arch = read_architecture(config.model.path)
    engines = _engines(config, gpu_gib)
    of_policy = (
        [(_cost(config, change), change) for change in _of_policy(config, arch)] if engines else []
    )
    known: dict[str, list[Share]] = {}  # of each layout
    trains: dict[int, bool] = {}  # whether it is valid, and training fits, by index in of_policy
    candidates = [
        (cost + engine_cost, i, engine)
        for i, (cost, _) in enumerate(of_policy)
        for engine_cost, engine in engines
    ]
    for _, i, engine in sorted(candidates, key=lambda candidate: candidate[0]):
        if not trains.get(i, True):
            continue
        change = of_policy[i][1] | engine
        changed = _with(config, change)
        if i not in trains and (
            validate(changed, has_cuda=True) or _least(changed, arch) > gpu_gib
        ):
            trains[i] = False
            continue
        layout = f"{changed.policy.parallel} {changed.policy.ranks}"
        if layout not in known:
            known[layout] = shares(changed, arch)
        plan = make_plan(changed, gpu_gib, trajectory_tokens, known[layout])
        if not plan.troubles():
            return change, plan
        trains[i] = plan.trains
    return None


def _engines(config: Config, gpu_gib: float) -> list[tuple[float, Change]]:
    """Engines on as many GPUs as now that have room for a call: for each share of a GPU the nearest."""
    engine = config.engine
    gpus = engine.num_engines * engine.tensor_parallel
    found: dict[float, tuple[float, Change]] = {}
    for share, tensor in product(
        {engine.gpu_memory_utilization, 0.5, 0.7, 0.8, 0.9},
        sorted({*IN_A_NODE, engine.tensor_parallel}),
    ):
        if gpus % tensor:
            continue
        change = _differing(
            config,
            {
                "engine.tensor_parallel": tensor,
                "engine.num_engines": gpus // tensor,
                "engine.gpu_memory_utilization": share,
            },
        )
        changed, cost = _with(config, change), _cost(config, change)
        beside = RESERVE_GIB if config.cluster.colocate else 0.0
        if share * gpu_gib + beside > gpu_gib or validate(changed, has_cuda=True):
            continue
        if engine_share(changed, gpu_gib).holds_a_call and (
            share not in found or cost < found[share][0]
        ):
            found[share] = cost, change
    return list(found.values())


def _least(config: Config, arch: Architecture) -> float:
    """GiB that the fullest stage cannot be below: weights and gradients split by all that can split them, the optimizer
    by all ranks, and the reserve. The exact shares of a layout take a second to find out."""
    p, size = config.policy.parallel, PRECISIONS[config.policy.precision].itemsize
    state = (12 if size == 2 else 8) * (1 - config.optimizer.cpu_offload_fraction)
    each = (size + 4) / (p.tensor * p.pipeline * p.expert) + state / config.policy.ranks
    return parameters(arch) * each / GIB + RESERVE_GIB


def _of_policy(config: Config, arch: Architecture) -> Iterator[Change]:
    """Every combination of the policy's settings that memory depends on."""
    p = config.policy.parallel
    budgets = [config.train.micro_batch_tokens // n for n in (1, 2, 4)]
    recompute = [config.policy.recompute] + [["full"]] * (config.policy.recompute != ["full"])
    offload = {config.optimizer.cpu_offload_fraction, 1.0}
    tensors, pipelines = sorted({*IN_A_NODE, p.tensor}), sorted({*SIZES[:5], p.pipeline})
    experts = sorted({*SIZES, p.expert}) if arch.experts else [1]
    for times, tensor, pipeline, expert in product((1, 2, 4), tensors, pipelines, experts):
        ranks = config.policy.ranks * times
        if ranks % (tensor * pipeline) or ranks % (expert * pipeline):
            continue  # most of them; what else can be wrong is left to validate()
        layout = _layout(config, arch, ranks, tensor, pipeline, expert)
        for budget, again, fraction in product(budgets, recompute, offload):
            yield _differing(
                config,
                layout
                | {
                    "train.micro_batch_tokens": budget,
                    "policy.recompute": again,
                    "optimizer.cpu_offload_fraction": fraction,
                },
            )


def _layout(
    config: Config, arch: Architecture, ranks: int, tensor: int, pipeline: int, expert: int
) -> Change:
    p = config.policy.parallel
    chunks = pipeline * p.virtual
    layers = p.layers_per_stage
    if pipeline != p.pipeline:
        layers = None if arch.layers % chunks == 0 else uneven(arch.layers, chunks)
    return {
        "policy.ranks": ranks,
        "policy.parallel.tensor": tensor,
        "policy.parallel.pipeline": pipeline,
        "policy.parallel.expert": expert,
        "policy.parallel.layers_per_stage": layers,
    }


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
        if key in (
            "policy.parallel.tensor",
            "policy.parallel.pipeline",
            "policy.parallel.expert",
            "engine.tensor_parallel",
        ):
            cost += abs(math.log2(value / value_of(config, key)))
        elif key == "train.micro_batch_tokens":
            cost += 0.7 * math.log2(value_of(config, key) / value)
        elif key == "policy.ranks":
            cost += 5 * math.log2(value / value_of(config, key))
        else:
            cost += {
                "policy.recompute": 1.0,
                "optimizer.cpu_offload_fraction": 2.5,
                "engine.gpu_memory_utilization": 0.5,
            }.get(key, 0.0)
    return cost


def _with(config, change: Change):
    """The config, or a section of it, with these values; what does not change is shared with the original."""
    own = {key: value for key, value in change.items() if "." not in key}
    for section in {key.partition(".")[0] for key in change if "." in key}:
        of_section = {
            key.partition(".")[2]: value
            for key, value in change.items()
            if key.startswith(f"{section}.")
        }
        own[section] = _with(getattr(config, section), of_section)
    return replace(config, **own)
