"""Keeps recorded routing out of the driver, from the end of an episode until it is trained on.

    AgentWorker ── a trajectory ───────────────► RoutingKeeper.add      at the end of each episode
    driver ─────── the group is complete ──────► RoutingKeeper.close
           ◄────── row numbers, references ─────
    ranks ◄─────── the objects of their layers ─ Ray                    policy/routing_fetch.py

One keeper runs on each node with agent workers. It owns the objects, and runs no code of users:
they outlive workers and engines. Ray frees them when the driver drops the group. A keeper that dies
takes its objects with it. Episodes of groups that were not complete then run again; if a complete
group is lost, the run continues from its newest checkpoint (`train.restarts`).
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megastep.config import Config
from megastep.distributed.references import get_routing
from megastep.errors import MegastepError
from megastep.models.architecture import read_architecture
from megastep.samples import store
from megastep.samples.routing import (
    Layout,
    StoredRows,
    expanded,
    routing_of_groups,
    run_lengths,
    store_rows,
    tables_of,
)
from megastep.samples.validation import model_limits, values_problem
from megastep.types import ExpertShape, Group, RoutingTable, StoredRouting, Trajectory

GroupKey = tuple[str, int]  # label of the pool, prompt
KEEPER_THREADS = 4
# A micro-batch that holds a part of a group fetches at most so much of its budget in vain.
PARTS_PER_MICRO_BATCH = 8


@dataclass(eq=False)
class ClosedGroup:
    """A group's routing as the driver gets it: no values."""

    table: RoutingTable | None = None  # None: no step recorded routing
    references: dict[int, ray.ObjectRef] = field(default_factory=dict)  # of the table
    # (trajectory, step), by place in the group → runs of rows, and a problem of their values;
    # row by row they would exceed the 100 KB up to which Ray sends a result with the reply
    runs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    problems: dict[tuple[int, int], str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)  # trajectories that the keeper does not have

    def attach(self, trajectories: list[Trajectory]) -> None:
        if self.table is None:
            return
        self.table.references = self.references
        for (trajectory, step), runs in self.runs.items():
            problem = self.problems.get((trajectory, step))
            routing = StoredRouting(self.table, expanded(runs), problem)
            trajectories[trajectory].steps[step].routing = routing


class RoutingKeeper:
    """A Ray actor with threads: numbering a group takes a while."""

    def __init__(self, config: Config):
        self._layout = layout_of(config)
        _, self._experts = model_limits(config)
        self._trajectories: dict[GroupKey, dict[int, Trajectory]] = {}

    def add(self, key: GroupKey, trajectory: Trajectory) -> None:
        """Its arrays stay in the object store, where the worker has put them."""
        self._trajectories.setdefault(key, {})[trajectory.index] = trajectory

    def close(self, key: GroupKey, indices: list[int]) -> ClosedGroup:
        """Store the routing of the trajectories with these indices, in their order."""
        kept = self._trajectories.get(key, {})
        missing = [index for index in indices if index not in kept]
        if missing:
            return ClosedGroup(missing=missing)
        trajectories = [kept[index] for index in indices]
        problems = _problems(trajectories, self._experts) if self._experts else {}
        stored = store_rows(trajectories, self._layout)
        self.forget(key)
        if stored is None:
            return ClosedGroup()
        runs = {place: run_lengths(rows) for place, rows in stored.rows.items()}
        return ClosedGroup(stored.table, _put(stored), runs, problems)

    def forget(self, key: GroupKey) -> None:
        self._trajectories.pop(key, None)


def _put(stored: StoredRows) -> dict[int, ray.ObjectRef]:
    """Each object into the object store, and a list of them for each stage: the driver, which holds
    only references to the lists, has the same work for any number of parts."""
    parts = len(stored.table.bounds) - 1
    lists: list[list] = [[None] * parts for _ in stored.table.stages]
    for (stage, part), array in stored.objects:
        lists[stage][part] = ray.put(array)
    return {stage: ray.put(references) for stage, references in enumerate(lists)}


def layout_of(config: Config) -> Layout:
    """A group within the budget is in one micro-batch; else trajectories may be divided."""
    budget = config.budget_tokens if config.train.pack_layout == "trie" else 0
    return Layout(
        stages=config.policy.parallel.stages(read_architecture(config.model.path).layers),
        whole_tokens=budget,
        part_tokens=budget // PARTS_PER_MICRO_BATCH,
        on_conflict=config.routing_replay.on_conflict,
    )


def _problems(trajectories: list[Trajectory], experts: ExpertShape) -> dict[tuple[int, int], str]:
    """Of the values; `validate` reports them if the step is trained, and checks the shapes."""
    problems = {}
    shape = len(experts.moe_layers), experts.top_k
    for t, trajectory in enumerate(trajectories):
        for s, step in enumerate(trajectory.steps):
            routing = step.routing
            if not isinstance(routing, np.ndarray) or routing.shape[1:] != shape:
                continue
            problem = values_problem(step, routing, experts)
            if problem is not None:
                problems[t, s] = problem
    return problems


def spawn_keeper(config: Config, node: str):
    """A keeper on this node, or on another one should the node be gone when Ray restarts it."""
    options = dict(
        num_cpus=0,
        max_concurrency=KEEPER_THREADS,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
    )
    return ray.remote(RoutingKeeper).options(**options).remote(config)


# ---------------------------------------------------------------- rollout files


def write_rollouts(path: Path, groups: list[Group]) -> None:
    """`store.write`; a task on this node, not this process, fetches routing by reference."""
    tables = tables_of(routing_of_groups(groups))
    if not tables:
        store.write(path, groups)
        return
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    task = ray.remote(_write).options(num_cpus=0, scheduling_strategy=here)
    references = [table.references for table in tables]
    try:
        ray.get(task.remote(str(path.absolute()), groups, references))
    except RayTaskError as error:
        if isinstance(error.cause, MegastepError):
            raise error.cause from None
        raise


def _write(path: str, groups: list[Group], references: list[dict]) -> None:
    for table, of_table in zip(tables_of(routing_of_groups(groups)), references, strict=True):
        table.references = of_table
    store.write(path, groups, get_routing)
