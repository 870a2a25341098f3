"""The state of the training loop; part of every checkpoint.

loop.json            position in the data, unfinished prompts, weight versions of the engines
ready.safetensors    groups that were generated and not yet trained on; absent if there are none
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megastep.checkpoint.manifest import check_types, read_object
from megastep.errors import CheckpointError
from megastep.samples import store
from megastep.types import Group

_LOOP, _READY = "loop.json", "ready.safetensors"
_NOT_PLAIN = ("ready", "ready_file")


@dataclass
class LoopState:
    step: int  # training steps done
    # In the prompts; empty: at their beginning.
    position: dict[str, int] = field(default_factory=dict)
    # Prompts whose episodes were interrupted, to be generated again.
    unfinished: list[int] = field(default_factory=list)
    # Of each ready group: training steps done when its rollout started.
    ready_begun: list[int] = field(default_factory=list)
    # Weight versions of all syncs to the engines, the newest last.
    synced_versions: list[int] = field(default_factory=list)
    evaluates: bool = False  # an evaluation was running
    ready: list[Group] = field(default_factory=list)
    ready_file: Path | None = None  # has the ready groups already, next to the checkpoint

    def write_ready(self, root: Path, write: Callable[[Path, list[Group]], None]) -> None:
        """Write the ready groups into `root`, for `write` to move: it may run in a process that
        cannot resolve their routing."""
        for left_by_a_kill in root.glob("ready_*.partial"):
            left_by_a_kill.unlink()
        path = root / f"ready_{self.step}.partial"
        write(path, self.ready)
        self.ready = []
        self.ready_file = path

    def write(self, folder: Path) -> None:
        plain = {name: value for name, value in vars(self).items() if name not in _NOT_PLAIN}
        (folder / _LOOP).write_text(json.dumps(plain))
        if self.ready_file is not None:
            os.replace(self.ready_file, folder / _READY)
        elif self.ready:
            store.write(folder / _READY, self.ready)

    @classmethod
    def read(cls, folder: Path) -> "LoopState":
        """An imported checkpoint has no loop state: its run starts at step 0."""
        if not (folder / _LOOP).is_file():
            return cls(step=0)
        state = cls(**_checked(folder / _LOOP))
        if (folder / _READY).is_file():
            state.ready = store.read(folder / _READY)
        return state


def _checked(path: Path) -> dict:
    """The entries of loop.json, each of its type: errors are found before any process starts."""
    plain = read_object(path)
    wanted: dict[str, type | tuple[type, ...]] = {
        "step": int,
        "position": dict,
        "unfinished": list,
        "ready_begun": list,
        "synced_versions": list,
        "evaluates": bool,
    }
    defaults = {**vars(LoopState(step=0)), "step": None}
    check_types(path, {**defaults, **plain}, wanted)
    unknown = sorted(set(plain) - set(wanted))
    if unknown:
        raise CheckpointError(f"{path}: {unknown[0]!r:.80} is not an entry of a loop state")
    for name in ("position", "unfinished", "ready_begun", "synced_versions"):
        found = plain.get(name, [])
        numbers = found.values() if isinstance(found, dict) else found
        for number in numbers:
            if type(number) is not int:
                raise CheckpointError(f"{path}: {name} holds {number!r:.80}, must hold integers")
    if plain["step"] < 0:
        raise CheckpointError(f"{path}: step is {plain['step']}, must be at least 0")
    return plain
