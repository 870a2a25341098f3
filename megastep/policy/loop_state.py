"""What the loop itself must remember to go on where it was; a part of every checkpoint.

    loop.json                where the data stands
    waiting.safetensors      groups that were played and not yet trained on, if there are any
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from megastep.samples import store
from megastep.types import Group

_LOOP, _WAITING = "loop.json", "waiting.safetensors"


@dataclass
class LoopState:
    step: int  # training steps done
    position: dict[str, int] = field(default_factory=dict)  # of the prompts; empty: at their beginning
    waiting: list[Group] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        (folder / _LOOP).write_text(json.dumps({"step": self.step, "position": self.position}))
        if self.waiting:
            store.write(folder / _WAITING, self.waiting)

    @classmethod
    def read(cls, folder: Path) -> "LoopState":
        """An imported checkpoint has none: it is where a run begins."""
        if not (folder / _LOOP).is_file():
            return cls(step=0)
        state = cls(**json.loads((folder / _LOOP).read_text()))
        if (folder / _WAITING).is_file():
            state.waiting = store.read(folder / _WAITING)
        return state
