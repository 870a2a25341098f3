"""Paths in a configuration: relative to their file; on the command line, to the working directory.

    model.path, loss.teacher,  folders
    run.resume
    data.train, data.eval,     FILE.jsonl, FILE.parquet, and hf:FOLDER if the folder exists
    warm_start.data
    env.options, agent.command strings that begin with ./ or ../

`run.dir`, the parent of run directories, is always relative to the working directory.
"""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

DATA_KEYS = ("data.train", "data.eval", "warm_start.data")
RESUME_WORDS = ("auto", "never")
DATA_FILES = (".jsonl", ".parquet")
OPTIONS = "env.options"
COMMAND = "agent.command"


def in_file(key: str, value: Any, folder: Path) -> Any:
    """A value of a file in `folder`, relative to the working directory."""
    if _is_option(key):
        return _in_options(value, folder)
    if not isinstance(value, str) or value == "":
        return value
    if key in DATA_KEYS:
        return _data_source(value, lambda path: _joined(folder, path))
    if key in ("model.path", "loss.teacher") or (key == "run.resume" and value not in RESUME_WORDS):
        return _joined(folder, value)
    return value


def on_command_line(key: str, value: Any) -> Any:
    return _in_options(value, Path()) if _is_option(key) else value


def _is_option(key: str) -> bool:
    return key in (OPTIONS, COMMAND) or key.startswith(f"{OPTIONS}.")


def _in_options(value: Any, folder: Path) -> Any:
    """Absolute paths, in lists and mappings too: config.yaml must be readable from any folder."""
    if isinstance(value, dict):
        return {name: _in_options(part, folder) for name, part in value.items()}
    if isinstance(value, list):
        return [_in_options(part, folder) for part in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return os.path.abspath(_joined(folder, value))
    return value


def absolute(config: Any) -> Any:
    """The config with absolute paths."""
    resume = config.run.resume
    data = config.data
    warm_start = config.warm_start
    return replace(
        config,
        model=replace(config.model, path=_absolute(config.model.path)),
        data=replace(data, train=_absolute_source(data.train), eval=_absolute_source(data.eval)),
        warm_start=replace(warm_start, data=_absolute_source(warm_start.data)),
        loss=replace(config.loss, teacher=config.loss.teacher and _absolute(config.loss.teacher)),
        run=replace(config.run, resume=resume if resume in RESUME_WORDS else _absolute(resume)),
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _absolute_source(source: str | None) -> str | None:
    return source and _data_source(source, _absolute)


def _data_source(source: str, move) -> str:
    if source.startswith("hf:"):
        place, colon, split = source.removeprefix("hf:").partition(":")
        folder = move(place) if place else ""
        is_hub_name = not os.path.isdir(folder)
        return source if is_hub_name else f"hf:{folder}{colon}{split}"
    return move(source) if source.endswith(DATA_FILES) else source


def name_too_long(error: BaseException) -> str | None:
    """A message if the error is a path that no file can have: invalid input, not a disk failure."""
    if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
        return None
    return (
        f"{str(error.filename)[:80]}...: a name of this path is too long for the file system; "
        "give a shorter one"
    )


def _joined(folder: Path, path: str) -> str:
    """configs/../models/x → models/x, unless a symbolic link makes them different."""
    joined = os.path.join(folder, path)
    short = os.path.normpath(joined)
    try:
        return short if os.path.realpath(short) == os.path.realpath(joined) else joined
    except ValueError:  # a NUL: rejected by checks.py
        return path
