"""Prompts: the rows of a data set, in an order that can be resumed.

`data.train` and `data.eval` name a source:

    generated                 rows drawn by the environment itself, `data.generated_rows` of them
    FILE.jsonl                one JSON object per line; blank lines are skipped
    FILE.parquet
    hf:PLACE or hf:PLACE:SPLIT    Hugging Face `datasets`: a folder written by `save_to_disk`, or a name on the hub

A row is what an environment is made from: columns by name, JSON values. Which ones an environment needs it says in
`Env.columns`; other columns are passed on. All rows are looked at before anything starts, and those that are not usable
are reported by file and line. Rows are held in memory.
"""

import json
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from megastep.config import DataConfig
from megastep.errors import DataError, EnvError
from megastep.rollout.env import Env, lone_surrogate, one_line, told

GENERATED = "generated"
SHOWN_PROBLEMS = 5
DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class Prompt:
    id: int  # names its group: the number of the draw it was
    row: dict[str, Any]


def load_data(config: DataConfig, env: type[Env], seed: int) -> tuple[list[dict], list[dict]]:
    """Rows to train on and rows held out from it: those of `data.eval`, else the last `data.held_out` of a shuffle."""
    rows = read_rows(config.train, env, config.generated_rows, seed)
    if config.eval is not None:
        return rows, read_rows(config.eval, env, config.generated_rows, seed + 1)
    if config.held_out >= len(rows):
        raise DataError(
            [
                f"data.held_out = {config.held_out}: {config.train} has {len(rows)} rows; hold out fewer"
            ]
        )
    order = np.random.default_rng([seed, 0x5B117]).permutation(len(rows)).tolist()
    cut = len(rows) - config.held_out
    return [rows[i] for i in sorted(order[:cut])], [rows[i] for i in sorted(order[cut:])]


# ---------------------------------------------------------------- reading


def read_rows(source: str, env: type[Env], generated_rows: int, seed: int) -> list[dict[str, Any]]:
    rows, problems = [], []
    for where, row in (
        _generated(env, generated_rows, seed) if source == GENERATED else _located(source)
    ):
        problem = row if isinstance(row, str) else _row_problem(row, env)
        if problem:
            problems.append(f"{where}: {problem}")
        else:
            rows.append(row)
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        raise DataError(
            problems[:SHOWN_PROBLEMS]
            + ([f"{source}: {more} more rows like these"] if more > 0 else [])
        )
    if not rows:
        raise DataError([f"{source}: has no rows"])
    return rows


def _located(source: str) -> Iterator[tuple[str, dict | str]]:
    """Each row with where it stands; a string is what is wrong with it."""
    if source.startswith("hf:"):
        yield from _hf_rows(source)
    elif source.endswith(".jsonl"):
        yield from _jsonl_rows(source)
    elif source.endswith(".parquet"):
        yield from _parquet_rows(source)
    else:
        raise DataError(
            [
                f"{source}: not a data set; FILE.jsonl, FILE.parquet, hf:PLACE or {GENERATED} is needed"
            ]
        )


def _generated(env: type[Env], count: int, seed: int) -> Iterator[tuple[str, dict]]:
    for i in range(count):
        try:
            row = env.generate(Random(f"{seed}/{i}"))
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise EnvError(
                f"data.train = {GENERATED}: {env.__name__}.generate raised {told(error)}"
            ) from None
        yield f"{GENERATED}: row {i + 1}", _object(row)


def _jsonl_rows(source: str) -> Iterator[tuple[str, dict | str]]:
    try:
        yield from json_lines(Path(source))
    except ValueError as error:
        raise DataError([str(error)]) from None


def json_lines(path: Path) -> Iterator[tuple[str, dict | str]]:
    """The object of each line that is not blank, with where it stands; a string is what is wrong with it.

    Lines end with a newline, a carriage return or both, and with nothing else: U+2028 may stand within a JSON text. A
    byte order mark at the beginning is no part of the first line. Raises ValueError of one line without a file.
    """
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        content = path.read_bytes() if is_file else b""  # a pipe would be waited for
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: cannot be read ({reason})") from None
    if not is_file:
        raise ValueError(f"{path}: cannot be read (not a file)")
    lines = content.removeprefix(b"\xef\xbb\xbf").splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}:{number}", _json_object(line)


def _json_object(line: bytes) -> dict | str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not readable as JSON ({one_line(error)})"
    if b"\\u" in line and (problem := lone_surrogate(value)):
        return f"not Unicode text: {problem}"
    return _object(value)


def _object(row: Any) -> dict | str:
    return (
        row
        if isinstance(row, dict)
        else f"holds a {type(row).__name__}; an object with columns is needed"
    )


def _parquet_rows(source: str) -> Iterator[tuple[str, dict]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(source)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            [f"{source}: cannot be read as Parquet ({' '.join(str(error).split())[:160]})"]
        ) from None
    try:
        rows = table.to_pylist()
    except (ValueError, OverflowError) as error:  # text that is no UTF-8, times beyond Python's
        raise DataError([f"{source}: cannot be read as Parquet ({one_line(error)})"]) from None
    for number, row in enumerate(rows, 1):
        yield f"{source}: row {number}", row


def _hf_rows(source: str) -> Iterator[tuple[str, dict]]:
    import datasets

    place, _, split = source.removeprefix("hf:").partition(":")
    try:
        found = (
            datasets.load_from_disk(place) if Path(place).is_dir() else datasets.load_dataset(place)
        )
    except (
        Exception
    ) as error:  # the library raises many kinds, for hubs out of reach as for wrong names
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise DataError([f"{source}: cannot be loaded ({why})"]) from None
    if isinstance(found, datasets.DatasetDict):
        split = split or DEFAULT_SPLIT
        if split not in found:
            raise DataError(
                [
                    f"{source}: has no split {split}; write hf:{place}:SPLIT with one of {', '.join(found)}"
                ]
            )
        found = found[split]
    elif split:
        raise DataError([f"{source}: has no splits; write hf:{place}"])
    for number, row in enumerate(found, 1):
        yield f"{source}: row {number}", row


def _row_problem(row: dict[str, Any], env: type[Env]) -> str | None:
    for name, kind in env.columns.items():
        value = row.get(name)
        if value is None:
            needs = ", ".join(f"{n} ({k.__name__})" for n, k in env.columns.items())
            return f"column {name} is missing; {env.__name__} needs {needs}"
        fits = isinstance(value, (int, float) if kind is float else kind) and not (
            isinstance(value, bool) and kind is not bool
        )
        if not fits:
            return f"column {name} is {str(value)[:40]!r}; {kind.__name__} is needed"
    return None


# ---------------------------------------------------------------- drawing


class PromptStream:
    """Endless prompts, shuffled anew each epoch. `position` and `seek` make it resumable."""

    def __init__(self, rows: list[dict[str, Any]], seed: int, shuffle: bool = True):
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self._go_to(0, 0)

    def take(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def prompt(self, id: int) -> Prompt:
        """One that was drawn before."""
        epoch, index = divmod(id, len(self.rows))
        return Prompt(id, self.rows[self._order(epoch)[index]])

    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index} | self._identity

    def seek(self, position: dict[str, int]) -> None:
        """Refuses a position among other rows: the number of a prompt would stand for another one there."""
        other = [
            f"{name} {position.get(name)}, not {ours}"
            for name, ours in self._identity.items()
            if position.get(name) != ours
        ]
        if other:
            raise DataError(
                [
                    f"data.train: is not what the checkpoint was trained on ({'; '.join(other)}); to train "
                    "its weights on other prompts, export them and begin a run with model.path"
                ]
            )
        self._go_to(position["epoch"], position["index"])

    @cached_property
    def _identity(self) -> dict[str, int]:
        """Of the prompts and their order, by a sample of the rows."""
        shown = self.rows[:: max(len(self.rows) // 1000, 1)]
        checksum = zlib.crc32(json.dumps(shown, default=str).encode())
        return {
            "rows": len(self.rows),
            "checksum": checksum,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def _go_to(self, epoch: int, index: int) -> None:
        self.epoch, self.index, self.order = epoch, index, self._order(epoch)

    def _order(self, epoch: int) -> np.ndarray:
        shuffled = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        return shuffled if self.shuffle else np.arange(len(self.rows))

    def _next(self) -> Prompt:
        if self.index == len(self.rows):
            self._go_to(self.epoch + 1, 0)
        prompt = Prompt(self.epoch * len(self.rows) + self.index, self.rows[self.order[self.index]])
        self.index += 1
        return prompt
