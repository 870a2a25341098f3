"""What the loop itself must remember to go on where it was; a part of every checkpoint.

loop.json                where the data stands, which prompts had begun, which policies the engines have had
ready.safetensors        groups that were played and not yet trained on, if there are any
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from megastep.checkpoint.manifest import check_types, read_object
from megastep.errors import CheckpointError
from megastep.samples import store
from megastep.types import Group

_LOOP, _READY = "loop.json", "ready.safetensors"


@dataclass
class LoopState:
    step: int  # training steps done
    position: dict[str, int] = field(
        default_factory=dict
    )  # of the prompts; empty: at their beginning
    unfinished: list[int] = field(
        default_factory=list
    )  # prompts that have begun and must be played again
    ready_begun: list[int] = field(
        default_factory=list
    )  # of each ready group: training steps before it began
    synced_versions: list[int] = field(
        default_factory=list
    )  # versions that the engines have had, the newest last
    evaluates: bool = False  # held-out prompts were being played
    ready: list[Group] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        plain = {name: value for name, value in vars(self).items() if name != "ready"}
        (folder / _LOOP).write_text(json.dumps(plain))
        if self.ready:
            store.write(folder / _READY, self.ready)

    @classmethod
    def read(cls, folder: Path) -> "LoopState":
        """An imported checkpoint has none: it is where a run begins."""
        if not (folder / _LOOP).is_file():
            return cls(step=0)
        state = cls(**_checked(folder / _LOOP))
        if (folder / _READY).is_file():
            state.ready = store.read(folder / _READY)
        return state


def _checked(path: Path) -> dict:
    """Every entry has its type: what is wrong is found before any process starts."""
    plain = read_object(path)
    wanted = {
        "step": int,
        "position": dict,
        "unfinished": list,
        "ready_begun": list,
        "synced_versions": list,
        "evaluates": bool,
    }
    check_types(path, {**vars(LoopState(step=0)), **{"step": None}, **plain}, wanted)
    unknown = sorted(set(plain) - set(wanted))
    if unknown:
        raise CheckpointError(f"{path}: {unknown[0]!r:.80} is no part of a loop's state")
    for name in ("position", "unfinished", "ready_begun", "synced_versions"):
        numbers = plain.get(name, [])
        for number in numbers.values() if isinstance(numbers, dict) else numbers:
            if type(number) is not int:
                raise CheckpointError(
                    f"{path}: {name} holds {number!r:.80}, must hold whole numbers"
                )
    if plain["step"] < 0:
        raise CheckpointError(f"{path}: step is {plain['step']}, must be at least 0")
    return plain
