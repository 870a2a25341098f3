"""Routing by reference: each distinct row of a group's recorded routing, stored once, in parts.

    store_rows    Step.routing of a group → a RoutingTable, row numbers per step, and its objects
    fetch         objects of a table → this process, for the rows and layers that are needed

Steps that recorded the same experts for a token share a row; those that disagree have a row each.
So row numbers suffice to fold: two steps conflict where their rows differ (samples/trie.py).

The parts follow the use of the rows. A group of three trajectories, the last two of them short:

    part 0    rows of several trajectories: their common prompt
    part 1    the other rows of trajectory 0
    part 2    the other rows of trajectories 1 and 2
    part 3    rows that lose a conflict: nobody needs them under `on_conflict: owner`

A data-parallel rank fetches the parts of its trajectories, a pipeline stage its own layers. A group
that is in one micro-batch anyway has one part in place of the first three.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from megastep.errors import RolloutError
from megastep.samples.trie import (
    FoldReport,
    Owners,
    Tree,
    find_conflicts,
    number_variants,
)
from megastep.samples.validation import routing_problems, unrecorded
from megastep.types import (
    Group,
    MicroBatch,
    Routing,
    RoutingTable,
    Sample,
    StoredRouting,
    Trajectory,
)

Key = tuple[int, int]  # stage, part


@dataclass(frozen=True)
class Layout:
    """How the rows of a group are stored."""

    stages: list[tuple[int, ...]]  # the layers of each pipeline stage
    whole_tokens: int = 0  # a group with at most so many rows is not divided
    part_tokens: int = 0  # trajectories with fewer rows share a part
    on_conflict: str = "owner"


@dataclass(eq=False)
class StoredRows:
    table: RoutingTable
    rows: dict[tuple[int, int], np.ndarray]  # (trajectory, step) → [n] i32; by place in the group
    objects: Iterator[tuple[Key, np.ndarray]]  # each made when it is asked for


def store_rows(trajectories: list[Trajectory], layout: Layout) -> StoredRows | None:
    """None: no step recorded routing."""
    places = [
        (t, s)
        for t, trajectory in enumerate(trajectories)
        for s, step in enumerate(trajectory.steps)
        if step.routing is not None
    ]
    if not places:
        return None
    samples = [Sample(trajectories[t].steps[s], 0, t, 0.0, 0.0) for t, s in places]
    _check(trajectories, samples, sum(map(len, layout.stages)))
    distinct = _Distinct(samples)
    part = _parts(distinct, samples, layout)
    order = np.argsort(part, kind="stable").astype(np.int32)
    number = np.empty_like(order)  # [row] its number in the table
    number[order] = np.arange(len(order), dtype=np.int32)

    first = samples[0].step.routing
    assert isinstance(first, np.ndarray)
    table = RoutingTable(
        bounds=np.append(0, np.cumsum(np.bincount(part))),
        stages=layout.stages,
        top_k=first.shape[2],
        dtype=first.dtype,
    )
    rows = {place: number[rows] for place, rows in zip(places, distinct.rows)}
    return StoredRows(table, rows, _objects(table, distinct, order))


def _check(trajectories: list[Trajectory], samples: list[Sample], layers: int) -> None:
    """The shapes that numbering relies on; `validate` checks what is trained."""
    problems = []
    shapes = set()
    for sample in samples:
        step = sample.step
        assert step.routing is not None
        trajectory = trajectories[sample.trajectory]
        where = f"group {trajectory.group_id}, trajectory {trajectory.index}, step {step.index}"
        problems += [f"{where}: {problem}" for problem in routing_problems(step, step.routing)]
        shapes.add((*step.routing.shape[1:], str(step.routing.dtype)))
        if step.routing.shape[1] != layers:
            found = step.routing.shape[1]
            problems.append(f"{where}: routing of {found} layers, the model has {layers}")
    if len(shapes) > 1:
        problems.append(f"routing: one shape and dtype per group, found {sorted(shapes)}")
    for trajectory in trajectories:
        where = f"group {trajectory.group_id}, trajectory {trajectory.index}"
        problems += unrecorded(trajectory, where)
    if problems:
        raise RolloutError(problems)


class _Distinct:
    """The distinct rows of some samples: those of the owners in the order of the trie, then those
    that differ from the owner's."""

    def __init__(self, samples: list[Sample]):
        tree = Tree(samples)
        position = tree.positions()
        owners = Owners(samples, tree, position)
        owner = owners.owner
        recorded = owner >= 0
        self.owned = int(np.count_nonzero(recorded))  # rows of owners
        row_of_token = np.cumsum(recorded, dtype=np.int32) - 1
        starts = np.array([sample.step.routing_start for sample in samples])
        self.samples = samples
        # [row] the sample that has it, and its index in the sample's routing
        self.source = owner[recorded]
        self.index = position[recorded] - starts[self.source]
        # [sample] [n] rows of its routing
        self.rows = []
        for i, sample in enumerate(samples):
            runs = tree.runs(i, sample.step.routing_start, sample.step.routing_end)
            pieces = [row_of_token[token : token + length] for token, _, length in runs]
            self.rows.append(np.concatenate(pieces) if pieces else row_of_token[:0])
        self._add_conflicting(find_conflicts(samples, tree, owners, FoldReport()))

    def _add_conflicting(self, conflicts: list) -> None:
        if not conflicts:
            return
        variants = number_variants(self.samples, conflicts)
        count = max(int(numbers.max()) for numbers in variants)
        source = np.empty(count, self.source.dtype)
        index = np.empty(count, self.index.dtype)
        for conflict, numbers in zip(conflicts, variants):
            own_index = conflict.position - self.samples[conflict.sample].step.routing_start
            self.rows[conflict.sample][own_index] = self.owned + numbers - 1
            source[numbers - 1] = conflict.sample
            index[numbers - 1] = own_index
        self.source = np.append(self.source, source)
        self.index = np.append(self.index, index)

    def __len__(self) -> int:
        return len(self.source)


def _parts(distinct: _Distinct, samples: list[Sample], layout: Layout) -> np.ndarray:
    """[row] the part that holds it."""
    part = np.zeros(len(distinct), np.int64)
    if distinct.owned > layout.whole_tokens:
        part = _parts_by_use(distinct, samples, layout.part_tokens)
    if layout.on_conflict == "owner":
        part[distinct.owned :] = part.max(initial=0) + 1
    return part


def _parts_by_use(distinct: _Distinct, samples: list[Sample], part_tokens: int) -> np.ndarray:
    user = np.full(len(distinct), -1)  # [row] the last trajectory that uses it
    shared = np.zeros(len(distinct), bool)
    for sample, rows in zip(samples, distinct.rows):
        shared[rows] |= (user[rows] >= 0) & (user[rows] != sample.trajectory)
        user[rows] = sample.trajectory
    own_rows = np.bincount(user[~shared], minlength=samples[-1].trajectory + 1)
    part_of_trajectory = []
    part = 0
    filled = part_tokens  # the first trajectory begins part 1
    for count in own_rows.tolist():
        if filled >= part_tokens:
            part += 1
            filled = 0
        part_of_trajectory.append(part)
        filled += count
    return np.where(shared, 0, np.array(part_of_trajectory)[user])


def _objects(
    table: RoutingTable, distinct: _Distinct, order: np.ndarray
) -> Iterator[tuple[Key, np.ndarray]]:
    """The objects of all parts with rows."""
    source = distinct.source[order]
    index = distinct.index[order]
    for part, (first, stop) in enumerate(zip(table.bounds.tolist(), table.bounds[1:].tolist())):
        if first == stop:
            continue
        runs = _source_runs(source[first:stop], index[first:stop])
        for stage, layers in enumerate(table.stages):
            array = np.empty((stop - first, len(layers), table.top_k), table.dtype)
            columns = slice(layers[0], layers[-1] + 1)
            own = [layer - layers[0] for layer in layers]
            for start, end, sample, row in runs:
                routing = distinct.samples[sample].step.routing
                assert isinstance(routing, np.ndarray)
                rows = routing[row : row + end - start, columns]
                array[start:end] = rows if rows.shape[1] == len(layers) else rows[:, own]
            yield (stage, part), array


def _source_runs(source: np.ndarray, index: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Runs of rows that one sample has in a row: (first, stop, sample, index of the first)."""
    begins = (np.diff(source) != 0) | (np.diff(index) != 1)
    start = np.append(0, np.flatnonzero(begins) + 1)
    columns = start, np.append(start[1:], len(source)), source[start], index[start]
    return list(zip(*(column.tolist() for column in columns)))


def run_lengths(rows: np.ndarray) -> np.ndarray:
    """[m, 2] i32: runs of consecutive rows, as (first row, number of rows).

    >>> run_lengths(np.array([0, 1, 2, 7, 8])).tolist()
    [[0, 3], [7, 2]]
    """
    start = np.append(0, np.flatnonzero(np.diff(rows) != 1) + 1)[: len(rows)]
    length = np.diff(np.append(start, len(rows)))
    return np.stack([rows[start], length], axis=1).astype(np.int32)


def expanded(runs: np.ndarray) -> np.ndarray:
    """[n] i32: the rows of `run_lengths`."""
    if len(runs) == 1:  # the usual case
        return np.arange(runs[0, 0], runs[0].sum(), dtype=np.int32)
    first, length = runs.T
    begin = np.cumsum(length, dtype=np.int32) - length
    return np.arange(length.sum(), dtype=np.int32) + np.repeat(first - begin, length)


def drop_routing(trajectory: Trajectory) -> Trajectory:
    """A copy without routing."""
    return replace(trajectory, steps=[step.replaced(routing=None) for step in trajectory.steps])


# ---------------------------------------------------------------- fetching


def routing_of_groups(groups: Iterable[Group]) -> list[Routing]:
    steps = [step for group in groups for t in group.trajectories for step in t.steps]
    return [step.routing for step in steps if step.routing is not None]


def routing_of_batches(micro_batches: Iterable[MicroBatch]) -> list[Routing]:
    routes = [micro_batch.trie.routes for micro_batch in micro_batches]
    return [rows for of_batch in routes if of_batch is not None for rows in of_batch.rows]


def tables_of(routing: Iterable[Routing]) -> list[RoutingTable]:
    """The distinct tables, in the order in which they appear."""
    tables = {id(r.table): r.table for r in routing if isinstance(r, StoredRouting)}
    return list(tables.values())


def fetch(
    routing: Iterable[Routing],
    layers: Container[int] | None,
    get: Callable[[list], list],
) -> int:
    """Bring the objects with these rows and layers (None: all) into this process; returns their
    bytes. `get` resolves references."""
    stored = [rows for rows in routing if isinstance(rows, StoredRouting)]
    parts: dict[int, set[int]] = {}  # by id of a table
    for rows in stored:
        parts.setdefault(id(rows.table), set()).update(rows.parts().tolist())
    needed = [
        (table, stage) for table in tables_of(stored) for stage in _stages_with(table, layers)
    ]
    lists = get([table.references[stage] for table, stage in needed])
    objects = [
        (table, (stage, part), references[part])
        for (table, stage), references in zip(needed, lists, strict=True)
        for part in sorted(parts[id(table)])
        if (stage, part) not in table.arrays
    ]
    fetched = 0
    arrays = get([reference for _, _, reference in objects])
    for (table, key, _), array in zip(objects, arrays, strict=True):
        table.arrays[key] = array
        fetched += array.nbytes
    return fetched


def _stages_with(table: RoutingTable, layers: Container[int] | None) -> list[int]:
    return [
        stage
        for stage, own_layers in enumerate(table.stages)
        if layers is None or any(layer in layers for layer in own_layers)
    ]


def release(routing: Iterable[Routing]) -> None:
    """Drop the objects that were fetched for these rows."""
    for table in tables_of(routing):
        table.arrays.clear()
