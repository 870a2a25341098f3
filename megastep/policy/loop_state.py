"""What the loop itself must remember to go on where it was; a part of every checkpoint.

    loop.json                where the data stands, which prompts had begun, which policies the engines have had
    ready.safetensors        groups that were played and not yet trained on, if there are any
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from megastep.samples import store
from megastep.types import Group

_LOOP, _READY = "loop.json", "ready.safetensors"


@dataclass
class LoopState:
    step: int  # training steps done
    position: dict[str, int] = field(default_factory=dict)  # of the prompts; empty: at their beginning
    unfinished: list[int] = field(default_factory=list)  # prompts that have begun and must be played again
    ready_begun: list[int] = field(default_factory=list)  # of each ready group: training steps before it began
    pushed: list[int] = field(default_factory=list)  # versions that the engines have had, the newest last
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
        state = cls(**json.loads((folder / _LOOP).read_text()))
        if (folder / _READY).is_file():
            state.ready = store.read(folder / _READY)
        return state
