"""Rollouts on disk: one safetensors file per batch, flat columns with offsets, and a JSON header.

Offsets: entry i owns offsets[i] to offsets[i + 1] of the column that the arrow points to.
G groups, N trajectories, S steps.

    group/id              i64 [G]        group/trajectories      i64 [G + 1]  → trajectories
    trajectory/index      i32 [N]        trajectory/steps        i64 [N + 1]  → steps
    step/index            i32 [S]        step/prompt_tokens      i64 [S + 1]  → prompt_ids
    step/last             bool [S]       step/response_tokens    i64 [S + 1]  → response_ids,
                                                                                loss_mask, logprobs
    step/reward           f64 [S]        step/version_runs       i64 [S + 1]  → versions
    step/finish           u8 [S]         an index into types.FinishReason
    step/has_logprobs     bool [S]       False: ignore the step's part of logprobs
    prompt_ids            i32 [ΣP]       response_ids            i32 [ΣR]
    loss_mask             bool [ΣR]      logprobs                f32 [ΣR]
    versions              i32 [ΣV, 2]
    optional, for all steps or absent:
    step/prompt_shared    i32 [S]        leading tokens of the trajectory's previous step, prompt
                                         and response, which the prompt repeats: prompt_ids holds
                                         the rest of it
    step/has_state        bool [S]       step/state              i64 [S]
    step/has_routing      bool [S]       step/routing_rows       i64 [S + 1]  → routing
    step/routing_start    i32 [S]        routing                 u8 or i16 [Σn, L, K]
    from version 2 on:
    checksums             u8 [4 + 4C]    zlib.crc32 of the header with its length, then of each of
                                         the C other columns in the order of the header, each as
                                         four bytes in little-endian order

The file's metadata holds `format` ("megastep.rollouts"), `version` ("3") and `trajectories`: JSON,
one object per trajectory with `stop_reason`, `env_metrics` and, where it is known, `sampling`: the
`temperature`, `top_p` and `top_k` that the logprobs include. A reader rejects a higher version;
within a version, columns are only added. Version 2 is without step/prompt_shared: its size grows
with the square of the number of turns. Version 1 is without checksums, for files written by other
programs; damage to its values is not detected.

Writing streams the steps' arrays, without a copy, into a temporary file next to the target and
renames it. Reading maps the file: every array is a read-only view, a shared prefix is a reference
to the previous step, and nothing is unpickled. The reader compares the checksums and validates the
rollouts.

numpy suffices to write a file. Two trajectories of one prompt, one step each:

    import json, struct
    import numpy as np

    columns = {
        "group/id": np.array([0]), "group/trajectories": np.array([0, 2]),
        "trajectory/index": np.array([0, 1], "i4"), "trajectory/steps": np.array([0, 1, 2]),
        "step/index": np.array([0, 0], "i4"), "step/last": np.array([True, True]),
        "step/reward": np.array([1.0, 0.0]), "step/finish": np.array([0, 0], "u1"),
        "step/has_logprobs": np.array([True, True]),
        "step/prompt_tokens": np.array([0, 3, 6]),
        "prompt_ids": np.array([5, 6, 7, 5, 6, 7], "i4"),
        "step/response_tokens": np.array([0, 2, 3]), "response_ids": np.array([8, 9, 4], "i4"),
        "loss_mask": np.array([True, True, True]), "logprobs": np.array([-0.1, -0.2, -1.5], "f4"),
        "step/version_runs": np.array([0, 1, 2]), "versions": np.array([[0, 2], [0, 1]], "i4"),
    }
    # Wide types first: every column then begins at a multiple of its item size.
    ordered = sorted(columns.items(), key=lambda item: -item[1].itemsize)
    names = {"i8": "I64", "f8": "F64", "i4": "I32", "f4": "F32", "u1": "U8", "b1": "BOOL"}
    trajectories = json.dumps([{"stop_reason": "done", "env_metrics": {}}] * 2)
    metadata = {"format": "megastep.rollouts", "version": "1", "trajectories": trajectories}
    header = {"__metadata__": metadata}
    start = 0
    for name, column in ordered:
        dtype = names[column.dtype.str[1:]]
        stop = start + column.nbytes
        header[name] = {"dtype": dtype, "shape": column.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open("rollouts.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, column in ordered:
            file.write(column.tobytes())
"""

import json
import math
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from megastep.errors import RolloutError, StoreError
from megastep.samples.prefix import shared_prefixes
from megastep.samples.routing import drop_routing, fetch, release
from megastep.samples.validation import validate
from megastep.types import (
    FinishReason,
    Group,
    Routing,
    Step,
    StoredRouting,
    Trajectory,
    routing_values,
)

FORMAT = "megastep.rollouts"
VERSION = 3
PROMPT_SHARED = "step/prompt_shared"
CHECKSUMS = "checksums"
DTYPES = {
    "I64": "<i8",
    "F64": "<f8",
    "I32": "<i4",
    "F32": "<f4",
    "I16": "<i2",
    "U8": "|u1",
    "BOOL": "|b1",
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Every column with its possible types and its number of axes. Unknown columns are ignored.
COLUMNS = {
    "group/id": ("I64", 1),
    "group/trajectories": ("I64", 1),
    "trajectory/index": ("I32", 1),
    "trajectory/steps": ("I64", 1),
    "step/index": ("I32", 1),
    "step/last": ("BOOL", 1),
    "step/reward": ("F64", 1),
    "step/finish": ("U8", 1),
    "step/has_logprobs": ("BOOL", 1),
    PROMPT_SHARED: ("I32", 1),
    "step/prompt_tokens": ("I64", 1),
    "step/response_tokens": ("I64", 1),
    "step/version_runs": ("I64", 1),
    "prompt_ids": ("I32", 1),
    "response_ids": ("I32", 1),
    "loss_mask": ("BOOL", 1),
    "logprobs": ("F32", 1),
    "versions": ("I32", 2),
    "step/has_state": ("BOOL", 1),
    "step/state": ("I64", 1),
    "step/has_routing": ("BOOL", 1),
    "step/routing_rows": ("I64", 1),
    "step/routing_start": ("I32", 1),
    "routing": ("U8 I16", 3),
    CHECKSUMS: ("U8", 1),
}
_FINISHES = list(FinishReason)
_FINISH_CODES: dict[str, int] = {finish: code for code, finish in enumerate(_FINISHES)}
OPTIONAL = (
    PROMPT_SHARED,
    "step/has_state",
    "step/state",
    "step/has_routing",
    "step/routing_rows",
    "step/routing_start",
    "routing",
    CHECKSUMS,
)


@dataclass
class _Column:
    """A column as pieces, which are written without a copy."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


# ---------------------------------------------------------------- writing


def write(
    path: str | Path, groups: list[Group], get: Callable[[list], list[np.ndarray]] = list
) -> None:
    """Write a file atomically. `get` resolves references to routing, one group at a time."""
    validate(groups)
    # Wide types first: every column then begins at a multiple of its item size.
    columns = dict(
        sorted(_columns(groups, get).items(), key=lambda item: -np.dtype(item[1].dtype).itemsize)
    )
    header = _header(columns, groups)
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(header)
            checksums = [zlib.crc32(header)]
            for column in columns.values():
                checksums.append(_write_column(file, column))
            file.write(np.array(checksums, "<u4").tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def without_routing(groups: list[Group]) -> list[Group]:
    """Copies without routing, which is most of a file."""
    return [
        replace(group, trajectories=[drop_routing(t) for t in group.trajectories])
        for group in groups
    ]


def _header(columns: dict[str, _Column], groups: list[Group]) -> bytes:
    trajectories = ",".join(_trajectory_json(t) for g in groups for t in g.trajectories)
    metadata = {"format": FORMAT, "version": str(VERSION), "trajectories": f"[{trajectories}]"}
    header: dict[str, Any] = {"__metadata__": metadata}
    checksums = _Column("|u1", (4 + 4 * len(columns),), [])
    start = 0
    for name, column in [*columns.items(), (CHECKSUMS, checksums)]:
        stop = start + column.nbytes
        header[name] = {
            "dtype": NAMES[column.dtype],
            "shape": column.shape,
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_column(file: BinaryIO, column: _Column) -> int:
    """Write a column and return its checksum."""
    checksum = 0
    for piece in column.pieces:
        if piece.size:
            content = np.ascontiguousarray(piece).data.cast("B")
            file.write(content)
            checksum = zlib.crc32(content, checksum)
    return checksum


def _trajectory_json(trajectory: Trajectory) -> str:
    fields: dict[str, Any] = {
        "stop_reason": trajectory.stop_reason,
        "env_metrics": trajectory.env_metrics,
    }
    if trajectory.sampling is not None:
        fields["sampling"] = trajectory.sampling
    try:
        return json.dumps(fields)
    except (TypeError, ValueError, RecursionError) as error:
        where = f"group {trajectory.group_id}, trajectory {trajectory.index}"
        raise StoreError(f"{where}: env_metrics must hold JSON values ({error})") from None


def _columns(
    groups: list[Group], get: Callable[[list], list[np.ndarray]] = list
) -> dict[str, _Column]:
    trajectories = [t for g in groups for t in g.trajectories]
    steps = [s for t in trajectories for s in t.steps]
    shared, new_ids = _prompts(trajectories)
    columns = {
        "group/id": _flat("<i8", [g.id for g in groups]),
        "group/trajectories": _offsets(len(g.trajectories) for g in groups),
        "trajectory/index": _flat("<i4", [t.index for t in trajectories]),
        "trajectory/steps": _offsets(len(t.steps) for t in trajectories),
        "step/index": _flat("<i4", [s.index for s in steps]),
        "step/last": _flat("|b1", [s.last for s in steps]),
        "step/reward": _flat("<f8", [s.reward for s in steps]),
        "step/finish": _flat("|u1", [_FINISH_CODES[s.finish] for s in steps]),
        "step/has_logprobs": _flat("|b1", [s.logprobs is not None for s in steps]),
        PROMPT_SHARED: _flat("<i4", shared),
        "step/prompt_tokens": _offsets(map(len, new_ids)),
        "step/response_tokens": _offsets(len(s.response_ids) for s in steps),
        "step/version_runs": _offsets(len(s.versions) for s in steps),
        "prompt_ids": _joined("<i4", (), new_ids),
        "response_ids": _joined("<i4", (), [s.response_ids for s in steps]),
        "loss_mask": _joined("|b1", (), [s.loss_mask for s in steps]),
        "logprobs": _joined("<f4", (), [_logprobs(s) for s in steps]),
        "versions": _joined("<i4", (2,), [s.versions for s in steps]),
    }
    if any(s.state is not None for s in steps):
        columns["step/has_state"] = _flat("|b1", [s.state is not None for s in steps])
        columns["step/state"] = _flat("<i8", [s.state or 0 for s in steps])
    recorded = [s.routing for s in steps if s.routing is not None]
    if recorded:
        columns["step/has_routing"] = _flat("|b1", [s.routing is not None for s in steps])
        columns["step/routing_rows"] = _offsets(s.routing_end - s.routing_start for s in steps)
        columns["step/routing_start"] = _flat("<i4", [s.routing_start for s in steps])
        columns["routing"] = _Column(
            recorded[0].dtype.str,
            (sum(map(len, recorded)), *recorded[0].shape[1:]),
            _routing_arrays(recorded, get),
        )
    return columns


def _routing_arrays(
    recorded: list[Routing], get: Callable[[list], list[np.ndarray]]
) -> Iterator[np.ndarray]:
    """The routing of each step; the objects of a group are fetched when it is reached."""

    def table_of(routing: Routing) -> int | None:
        return id(routing.table) if isinstance(routing, StoredRouting) else None

    for _, of_group in groupby(recorded, table_of):
        routings = list(of_group)
        fetch(routings, None, get)
        for routing in routings:
            yield routing_values(routing)
        release(routings)


def _prompts(trajectories: list[Trajectory]) -> tuple[list[int], list[np.ndarray]]:
    """Per step: how many prompt tokens it shares with the previous one, and the others."""
    shared = []
    new_ids = []
    for trajectory in trajectories:
        for _, prompt_ids, count in shared_prefixes(trajectory.steps):
            shared.append(count)
            # A view would keep the whole prompt until the file is written.
            new_ids.append(prompt_ids[count:].copy() if count else prompt_ids)
    return shared, new_ids


def _logprobs(step: Step) -> np.ndarray:
    if step.logprobs is None:
        return np.zeros(len(step.response_ids), np.float32)
    return step.logprobs


def _flat(dtype: str, values: list) -> _Column:
    return _Column(dtype, (len(values),), [np.array(values, dtype)])


def _offsets(lengths: Iterable[int]) -> _Column:
    return _flat("<i8", list(accumulate(lengths, initial=0)))


def _joined(dtype: str, shape: tuple[int, ...], pieces: list[np.ndarray]) -> _Column:
    """The pieces concatenated along their first axis; `shape`: of their other axes."""
    return _Column(dtype, (sum(map(len, pieces)), *shape), pieces)


# ---------------------------------------------------------------- reading


def read(path: str | Path) -> list[Group]:
    """The groups of a file; their arrays are read-only views of it."""
    file = Path(path)
    content = _map(file)
    header, start = _parse(file, content)
    metadata = header.pop("__metadata__", {})
    version = _check_format(file, metadata)
    try:
        ranges = {name: _byte_range(name, entry) for name, entry in header.items()}
        needed = max((stop for _, stop in ranges.values()), default=0)
        _check_size(file, len(content) - start, needed)
        parts = {
            name: content[start + first : start + stop] for name, (first, stop) in ranges.items()
        }
        _check_checksums(content[:start], parts, version)
        columns = {
            name: _view(name, header[name], part) for name, part in parts.items() if name in COLUMNS
        }
        groups = _groups(columns, _trajectories(metadata))
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise StoreError(
            f"{file}: damaged, its columns do not fit together ({_short(error)})"
        ) from None
    try:
        validate(groups)
    except RolloutError as error:
        raise StoreError(f"{file}: not a valid rollout: {error.summary()}") from None
    return groups


def _map(path: Path) -> memoryview:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
            raise StoreError(f"{path}: cannot be read (not a file)")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # mmap rejects empty files
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None


def _parse(path: Path, content: memoryview) -> tuple[dict, int]:
    """The safetensors header, and the first byte after it."""
    length = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0
    if not 0 < length < 2**40 or content[8:9] != b"{":
        raise StoreError(f"{path}: not a rollout file; `megastep rollout` writes one")
    if 8 + length > len(content):
        raise StoreError(f"{path}: truncated within its header")
    try:
        return json.loads(bytes(content[8 : 8 + length])), 8 + length
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{path}: not a rollout file, or damaged: its header is not JSON ({_short(error)})"
        ) from None


def _check_format(path: Path, metadata: object) -> int:
    """Check the format and return its version."""
    found = metadata.get("format") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or found != FORMAT:
        raise StoreError(
            f"{path}: a safetensors file but not a rollout file "
            f"(its format is {_short(repr(found))})"
        )
    version = metadata.get("version")
    if version in [str(known) for known in range(1, VERSION + 1)]:
        return int(version)
    raise StoreError(
        f"{path}: written in version {_short(version)} of the format, "
        f"this megastep reads up to {VERSION}"
    )


def _byte_range(name: str, entry: object) -> tuple[int, int]:
    """The first byte of a column, and the first byte after it."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _are_counts(offsets, 2) or offsets[0] > offsets[1]:
        raise ValueError(f"{_short(name)} has no valid data_offsets")
    return offsets[0], offsets[1]


def _are_counts(value: object, number: int) -> TypeGuard[list[int]]:
    """Whether the value is a list of `number` integers of 0 or more."""
    return (
        isinstance(value, list)
        and len(value) == number
        and all(type(n) is int and 0 <= n < 2**62 for n in value)
    )


def _check_size(path: Path, size: int, needed: int) -> None:
    if size < needed:
        raise StoreError(f"{path}: truncated, has {size} of {needed} bytes of its columns")
    if size > needed:
        raise StoreError(f"{path}: damaged, {size - needed} bytes follow its last column")


def _check_checksums(header: memoryview, parts: dict[str, memoryview], version: int) -> None:
    if CHECKSUMS not in parts:
        if version > 1:
            raise ValueError("the checksums are missing")
        return
    stored = np.frombuffer(parts[CHECKSUMS], np.uint8)
    covered = {"its header": header}
    covered |= {name: part for name, part in parts.items() if name != CHECKSUMS}
    if len(stored) != 4 * len(covered):
        raise ValueError(
            f"{len(stored)} bytes of checksums for {len(covered) - 1} columns and the header"
        )
    for (name, part), checksum in zip(covered.items(), stored.view("<u4").tolist()):
        if zlib.crc32(part) != checksum:
            raise ValueError(f"the checksum of {name} does not match")


def _view(name: str, entry: dict, part: memoryview) -> np.ndarray:
    dtypes, axes = COLUMNS[name]
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    if dtype not in dtypes.split() or not _are_counts(shape, axes):
        raise ValueError(
            f"{name} is {_short(dtype)} {_short(shape)}; "
            f"{dtypes.replace(' ', ' or ')} with {axes} axes is needed"
        )
    numpy_dtype = np.dtype(DTYPES[dtype])
    if math.prod(shape) * numpy_dtype.itemsize != len(part):
        raise ValueError(f"{name} has {len(part)} bytes for {dtype} {_short(shape)}")
    if dtype == "BOOL" and np.frombuffer(part, np.uint8).max(initial=0) > 1:
        raise ValueError(f"{name} holds other bytes than 0 and 1")
    return np.frombuffer(part, numpy_dtype).reshape(shape)


def _trajectories(metadata: dict) -> list[dict]:
    """stop_reason, env_metrics and sampling of each trajectory."""
    entries = json.loads(metadata["trajectories"])
    if not isinstance(entries, list):
        raise ValueError("trajectories is not a list")
    for i, entry in enumerate(entries):
        valid = (
            isinstance(entry, dict)
            and isinstance(entry.get("stop_reason"), str)
            and isinstance(entry.get("env_metrics"), dict)
        )
        if not valid:
            raise ValueError(f"entry {i} of trajectories lacks stop_reason or env_metrics")
        if not _is_sampling(entry.get("sampling")):
            raise ValueError(f"sampling of entry {i} of trajectories must hold numbers")
    return entries


def _is_sampling(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(type(n) in (int, float) for n in value.values())


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else text[:197] + "..."


def _groups(columns: dict[str, np.ndarray], entries: list[dict]) -> list[Group]:
    missing = [name for name in COLUMNS if name not in columns and name not in OPTIONAL]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")
    index = columns["trajectory/index"].tolist()
    if len(entries) != len(index):
        raise ValueError(f"trajectories has {len(entries)} entries for {len(index)} trajectories")
    steps = _steps(columns)
    step_ranges = _ranges(columns["trajectory/steps"], len(steps))
    if len(step_ranges) != len(index):
        raise ValueError(f"steps of {len(step_ranges)} trajectories for {len(index)} trajectories")
    if PROMPT_SHARED in columns:
        shared = columns[PROMPT_SHARED].tolist()
        if len(shared) != len(steps):
            raise ValueError(f"{PROMPT_SHARED} has {len(shared)} entries for {len(steps)} steps")
        for first, stop in step_ranges:
            _prepend_shared(steps[first:stop], shared[first:stop])
    groups = []
    members = _ranges(columns["group/trajectories"], len(index))
    for group_id, (first, stop) in zip(columns["group/id"].tolist(), members, strict=True):
        group = Group(group_id, [])
        for i in range(first, stop):
            first_step, stop_step = step_ranges[i]
            trajectory = Trajectory(
                group_id=group_id,
                index=index[i],
                steps=steps[first_step:stop_step],
                stop_reason=entries[i]["stop_reason"],
                env_metrics=entries[i]["env_metrics"],
                sampling=entries[i].get("sampling"),
            )
            group.trajectories.append(trajectory)
        groups.append(group)
    return groups


def _prepend_shared(steps: list[Step], shared: list[int]) -> None:
    """Put the prefixes of a trajectory's prompts before their stored parts."""
    possible = 0  # tokens of the previous step
    for i, (step, count) in enumerate(zip(steps, shared, strict=True)):
        if not 0 <= count <= possible:
            raise ValueError(f"{PROMPT_SHARED} is {count}, the previous step has {possible} tokens")
        if count:
            step.prepend(steps[i - 1], count)
        possible = len(step)


def _steps(columns: dict[str, np.ndarray]) -> list[Step]:
    count = len(columns["step/index"])

    def parts(name: str, offsets: str, has: str | None = None) -> list:
        """Per step: its part of a column, or None."""
        if name not in columns:
            return [None] * count
        column = columns[name]
        present = [True] * count if has is None else columns[has].tolist()
        ranges = _ranges(columns[offsets], len(column))
        return [
            column[first:stop] if is_present else None
            for (first, stop), is_present in zip(ranges, present, strict=True)
        ]

    def values(name: str, has: str | None, missing: int | None) -> list:
        """Per step: its entry of a column, or `missing`."""
        if name not in columns:
            return [missing] * count
        present = columns[has].tolist() if has else [True] * len(columns[name])
        return [
            value if is_present else missing
            for value, is_present in zip(columns[name].tolist(), present, strict=True)
        ]

    fields = {
        "index": columns["step/index"].tolist(),
        "last": columns["step/last"].tolist(),
        "prompt_ids": parts("prompt_ids", "step/prompt_tokens"),
        "response_ids": parts("response_ids", "step/response_tokens"),
        "loss_mask": parts("loss_mask", "step/response_tokens"),
        "logprobs": parts("logprobs", "step/response_tokens", "step/has_logprobs"),
        "versions": parts("versions", "step/version_runs"),
        "reward": columns["step/reward"].tolist(),
        "finish": [_FINISHES[code] for code in columns["step/finish"].tolist()],
        "routing": parts("routing", "step/routing_rows", "step/has_routing"),
        "routing_start": values("step/routing_start", None, 0),
        "state": values("step/state", "step/has_state", None),
    }
    return [Step(**dict(zip(fields, row))) for row in zip(*fields.values(), strict=True)]


def _ranges(offsets: np.ndarray, total: int) -> list[tuple[int, int]]:
    """(first, stop) of each entry."""
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != total or sorted(bounds) != bounds:
        raise ValueError("offsets must ascend from 0 to the length of their column")
    return list(zip(bounds, bounds[1:]))
