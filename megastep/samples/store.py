'''Rollouts on disk: one safetensors file per batch, flat columns with offsets, and a JSON header.

Offsets: entry i owns offsets[i] to offsets[i + 1] of the column below it. G groups, N trajectories, S steps.

    group/id              i64 [G]        group/trajectories      i64 [G + 1]  → trajectories
    trajectory/index      i32 [N]        trajectory/steps        i64 [N + 1]  → steps
    step/index            i32 [S]        step/prompt_tokens      i64 [S + 1]  → prompt_ids
    step/last             bool [S]       step/response_tokens    i64 [S + 1]  → response_ids, loss_mask, logprobs
    step/reward           f64 [S]        step/version_runs       i64 [S + 1]  → versions
    step/finish           u8 [S]         an index into types.FINISHES
    step/has_logprobs     bool [S]       False: the step's part of logprobs means nothing
    prompt_ids            i32 [ΣP]       response_ids            i32 [ΣR]
    loss_mask             bool [ΣR]      logprobs                f32 [ΣR]
    versions              i32 [ΣV, 2]
    optional, for all steps or not in the file:
    step/has_state        bool [S]       step/state              i64 [S]
    step/has_routing      bool [S]       step/routing_rows       i64 [S + 1]  → routing
    step/routing_start    i32 [S]        routing                 u8 or i16 [Σn, L, K]

The file's metadata holds `format` ("megastep.rollouts"), `version` ("1") and `trajectories`: JSON, one object per
trajectory with `stop_reason` and `env_metrics`. A reader refuses a higher version; within one, columns are only added.

Writing streams the steps' own arrays into a file beside the target and renames it: nothing is copied, and a reader
sees the old file or the new one. Reading maps the file: every array is a read-only view of it, and nothing is
unpickled. What is read is validated as a rollout.

A file can be written with numpy alone. Two samples of one prompt, one step each:

    import json, struct
    import numpy as np

    columns = {
        "group/id": np.array([0]), "group/trajectories": np.array([0, 2]),
        "trajectory/index": np.array([0, 1], "i4"), "trajectory/steps": np.array([0, 1, 2]),
        "step/index": np.array([0, 0], "i4"), "step/last": np.array([True, True]),
        "step/reward": np.array([1.0, 0.0]), "step/finish": np.array([0, 0], "u1"),
        "step/has_logprobs": np.array([True, True]),
        "step/prompt_tokens": np.array([0, 3, 6]), "prompt_ids": np.array([5, 6, 7, 5, 6, 7], "i4"),
        "step/response_tokens": np.array([0, 2, 3]), "response_ids": np.array([8, 9, 4], "i4"),
        "loss_mask": np.array([True, True, True]), "logprobs": np.array([-0.1, -0.2, -1.5], "f4"),
        "step/version_runs": np.array([0, 1, 2]), "versions": np.array([[0, 2], [0, 1]], "i4"),
    }
    names = {"i8": "I64", "f8": "F64", "i4": "I32", "f4": "F32", "i2": "I16", "u1": "U8", "b1": "BOOL"}
    trajectories = [{"stop_reason": "done", "env_metrics": {}}] * 2
    header = {"__metadata__": {"format": "megastep.rollouts", "version": "1", "trajectories": json.dumps(trajectories)}}
    at = 0
    for name, column in sorted(columns.items(), key=lambda item: -item[1].itemsize):
        dtype = names[column.dtype.str[1:]]
        header[name] = {"dtype": dtype, "shape": column.shape, "data_offsets": [at, at + column.nbytes]}
        at += column.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open("rollouts.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, column in sorted(columns.items(), key=lambda item: -item[1].itemsize):
            file.write(column.tobytes())
'''

import json
import mmap
import os
import struct
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from megastep.types import FINISHES, Group, RolloutError, Step, Trajectory, validate

FORMAT = "megastep.rollouts"
VERSION = 1
DTYPES = {"I64": "<i8", "F64": "<f8", "I32": "<i4", "F32": "<f4", "I16": "<i2", "U8": "|u1", "BOOL": "|b1"}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StoreError(ValueError):
    """A file that cannot be read or a rollout that cannot be written, in one line."""


@dataclass
class _Column:
    """A column as the pieces it consists of, so that writing it copies nothing."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


# ---------------------------------------------------------------- writing


def write(path: str | Path, groups: list[Group]) -> None:
    """Atomically: the file is complete under its name, or is not there."""
    validate(groups)
    columns = _columns(groups)
    trajectories = ",".join(_told(t) for g in groups for t in g.trajectories)
    metadata = {"format": FORMAT, "version": str(VERSION), "trajectories": f"[{trajectories}]"}
    header, at = {"__metadata__": metadata}, 0
    # Wide types first: every column then begins at a multiple of its item size.
    ordered = sorted(columns.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize)
    for name, column in ordered:
        header[name] = {"dtype": NAMES[column.dtype], "shape": column.shape, "data_offsets": [at, at + column.nbytes]}
        at += column.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    beside = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, column in ordered:
                for piece in column.pieces:
                    file.write(memoryview(np.ascontiguousarray(piece)).cast("B") if piece.size else b"")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _told(trajectory: Trajectory) -> str:
    try:
        return json.dumps({"stop_reason": trajectory.stop_reason, "env_metrics": trajectory.env_metrics})
    except TypeError as error:
        where = f"group {trajectory.group_id}, trajectory {trajectory.index}"
        raise StoreError(f"{where}: env_metrics must hold JSON values ({error})") from None


def _columns(groups: list[Group]) -> dict[str, _Column]:
    trajectories = [t for g in groups for t in g.trajectories]
    steps = [s for t in trajectories for s in t.steps]
    columns = {
        "group/id": _flat("<i8", [g.id for g in groups]),
        "group/trajectories": _offsets(len(g.trajectories) for g in groups),
        "trajectory/index": _flat("<i4", [t.index for t in trajectories]),
        "trajectory/steps": _offsets(len(t.steps) for t in trajectories),
        "step/index": _flat("<i4", [s.index for s in steps]),
        "step/last": _flat("|b1", [s.last for s in steps]),
        "step/reward": _flat("<f8", [s.reward for s in steps]),
        "step/finish": _flat("|u1", [FINISHES.index(s.finish) for s in steps]),
        "step/has_logprobs": _flat("|b1", [s.logprobs is not None for s in steps]),
        "step/prompt_tokens": _offsets(len(s.prompt_ids) for s in steps),
        "step/response_tokens": _offsets(len(s.response_ids) for s in steps),
        "step/version_runs": _offsets(len(s.versions) for s in steps),
        "prompt_ids": _joined("<i4", (), [s.prompt_ids for s in steps]),
        "response_ids": _joined("<i4", (), [s.response_ids for s in steps]),
        "loss_mask": _joined("|b1", (), [s.loss_mask for s in steps]),
        "logprobs": _joined("<f4", (), [
            np.zeros(len(s.response_ids), np.float32) if s.logprobs is None else s.logprobs for s in steps
        ]),
        "versions": _joined("<i4", (2,), [s.versions for s in steps]),
    }
    if any(s.state is not None for s in steps):
        columns["step/has_state"] = _flat("|b1", [s.state is not None for s in steps])
        columns["step/state"] = _flat("<i8", [s.state or 0 for s in steps])
    recorded = [s.routing for s in steps if s.routing is not None]
    if recorded:
        columns["step/has_routing"] = _flat("|b1", [s.routing is not None for s in steps])
        columns["step/routing_rows"] = _offsets(0 if s.routing is None else len(s.routing) for s in steps)
        columns["step/routing_start"] = _flat("<i4", [s.routing_start for s in steps])
        columns["routing"] = _joined(recorded[0].dtype.str, recorded[0].shape[1:], recorded)
    return columns


def _flat(dtype: str, values: list) -> _Column:
    return _Column(dtype, (len(values),), [np.array(values, dtype)])


def _offsets(lengths) -> _Column:
    return _flat("<i8", list(accumulate(lengths, initial=0)))


def _joined(dtype: str, shape: tuple, pieces: list[np.ndarray]) -> _Column:
    return _Column(dtype, (sum(map(len, pieces)), *shape), pieces)


# ---------------------------------------------------------------- reading


def read(path: str | Path) -> list[Group]:
    """The groups of a file; their arrays are read-only views of it."""
    header, data = _open(Path(path))
    metadata = header.pop("__metadata__", {})
    _check_format(path, metadata)
    try:
        columns = {name: _view(data, **entry) for name, entry in header.items()}
        groups = _groups(columns, json.loads(metadata["trajectories"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise StoreError(f"{path}: damaged, its columns do not fit together ({error})") from None
    try:
        validate(groups)
    except RolloutError as error:
        raise StoreError(f"{path}: not a valid rollout: {error.summary()}") from None
    return groups


def _open(path: Path) -> tuple[dict, memoryview]:
    """The safetensors header and the bytes after it, checked against the file's size."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    foreign = StoreError(f"{path}: not a rollout file; `megastep rollout` writes one")
    length = struct.unpack("<Q", mapped[:8])[0] if size >= 8 else 0
    if not 0 < length < 2**40 or mapped[8:9] != b"{":
        raise foreign
    if 8 + length > size:
        raise StoreError(f"{path}: truncated within its header")
    try:
        header = json.loads(bytes(mapped[8 : 8 + length]))
        needed = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise foreign from None
    if 8 + length + needed > size:
        raise StoreError(f"{path}: truncated, {size} of {8 + length + needed} bytes are there")
    return header, mapped[8 + length :]


def _check_format(path: str | Path, metadata: dict) -> None:
    if metadata.get("format") != FORMAT:
        found = metadata.get("format")
        raise StoreError(f"{path}: a safetensors file but not a rollout file (its format is {found!r})")
    version = metadata.get("version", "")
    if not version.isdigit():
        raise StoreError(f"{path}: its version is {version!r}, a number is needed")
    if int(version) > VERSION:
        raise StoreError(f"{path}: written in version {version} of the format, this megastep reads up to {VERSION}")


def _view(data: memoryview, dtype: str, shape: list[int], data_offsets: list[int]) -> np.ndarray:
    start, stop = data_offsets
    return np.frombuffer(data[start:stop], np.dtype(DTYPES[dtype])).reshape(shape)


def _groups(columns: dict[str, np.ndarray], told: list[dict]) -> list[Group]:
    steps = _steps(columns)
    index, bounds = columns["trajectory/index"].tolist(), _ranges(columns["trajectory/steps"], len(steps))
    groups = []
    members = _ranges(columns["group/trajectories"], len(index))
    for id, (first, stop) in zip(columns["group/id"].tolist(), members, strict=True):
        trajectories = [
            Trajectory(id, index[i], steps[slice(*bounds[i])], told[i]["stop_reason"], told[i]["env_metrics"])
            for i in range(first, stop)
        ]
        groups.append(Group(id, trajectories))
    return groups


def _steps(columns: dict[str, np.ndarray]) -> list[Step]:
    def parts(name: str, offsets: str, has: str | None = None) -> list:
        if name not in columns:
            return [None] * len(columns["step/index"])
        column = columns[name]
        present = [True] * len(columns["step/index"]) if has is None else columns[has].tolist()
        ranges = _ranges(columns[offsets], len(column))
        return [column[a:b] if there else None for (a, b), there in zip(ranges, present, strict=True)]

    def values(name: str, has: str | None, missing) -> list:
        if name not in columns:
            return [missing] * len(columns["step/index"])
        present = columns[has].tolist() if has else [True] * len(columns[name])
        return [value if there else missing for value, there in zip(columns[name].tolist(), present, strict=True)]

    fields = {
        "index": columns["step/index"].tolist(),
        "last": columns["step/last"].tolist(),
        "prompt_ids": parts("prompt_ids", "step/prompt_tokens"),
        "response_ids": parts("response_ids", "step/response_tokens"),
        "loss_mask": parts("loss_mask", "step/response_tokens"),
        "logprobs": parts("logprobs", "step/response_tokens", "step/has_logprobs"),
        "versions": parts("versions", "step/version_runs"),
        "reward": columns["step/reward"].tolist(),
        "finish": [FINISHES[code] for code in columns["step/finish"].tolist()],
        "routing": parts("routing", "step/routing_rows", "step/has_routing"),
        "routing_start": values("step/routing_start", None, 0),
        "state": values("step/state", "step/has_state", None),
    }
    return [Step(**dict(zip(fields, row))) for row in zip(*fields.values(), strict=True)]


def _ranges(offsets: np.ndarray, total: int) -> list[tuple[int, int]]:
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != total or sorted(bounds) != bounds:
        raise ValueError("offsets must ascend from 0 to the length of their column")
    return list(zip(bounds, bounds[1:]))
