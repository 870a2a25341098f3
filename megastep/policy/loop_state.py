"""What the loop itself must remember to go on where it was; a part of every checkpoint.

    loop.json                where the data stands, which prompts had begun, which policies the engines have had
    waiting.safetensors      groups that passed the filters and were not yet trained on, if there are any
    ready.safetensors        groups that were played and not yet looked at
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from megastep.samples import store
from megastep.types import Group

_LOOP, _GROUPS = "loop.json", ("waiting", "ready")


@dataclass
class LoopState:
    step: int  # training steps done
    position: dict[str, int] = field(default_factory=dict)  # of the prompts; empty: at their beginning
    unfinished: list[int] = field(default_factory=list)  # prompts that have begun and must be played again
    ready_begun: list[int] = field(default_factory=list)  # of each ready group: training steps before it began
    pushed: list[int] = field(default_factory=list)  # versions that the engines have had, the newest last
    waiting: list[Group] = field(default_factory=list)
    ready: list[Group] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        plain = {name: value for name, value in vars(self).items() if name not in _GROUPS}
        (folder / _LOOP).write_text(json.dumps(plain))
        for name in _GROUPS:
            if getattr(self, name):
                store.write(folder / f"{name}.safetensors", getattr(self, name))

    @classmethod
    def read(cls, folder: Path) -> "LoopState":
        """An imported checkpoint has none: it is where a run begins."""
        if not (folder / _LOOP).is_file():
            return cls(step=0)
        state = cls(**json.loads((folder / _LOOP).read_text()))
        for name in _GROUPS:
            path = folder / f"{name}.safetensors"
            if path.is_file():
                setattr(state, name, store.read(path))
        return state
