"""How far it is: a bar on a terminal; lines in a log, which nobody wants to read a bar in."""

import sys
from typing import TextIO

from tqdm import tqdm

LOG_EVERY_S = 5.0
IN_A_LOG = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def progress(name: str, total: int, unit: str, done: int = 0, file: TextIO | None = None) -> tqdm:
    """Goes to stdout unless `file` is given."""
    file = file or sys.stdout
    given = dict(total=total, initial=done, desc=name, unit=unit)
    if file.isatty():
        return tqdm(**given, file=file, dynamic_ncols=True, mininterval=0.5)
    return tqdm(**given, file=_Lines(file), bar_format=IN_A_LOG, mininterval=LOG_EVERY_S)


class _Lines:
    """Each state of a bar as a line. tqdm begins a state with a carriage return, and pads it with blanks."""

    def __init__(self, file: TextIO):
        self.file, self.last = file, ""

    def write(self, text: str) -> None:
        place = text.partition(" [")[0].strip()
        if place not in ("", self.last):  # it says the last one again when it is closed
            self.file.write(text.strip() + "\n")
            self.last = place

    def flush(self) -> None:
        self.file.flush()
