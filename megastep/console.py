"""Progress of long work: a bar or a counter on a terminal, plain lines in a log."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

LOG_EVERY_S = 5.0
WAIT_LOG_EVERY_S = 30.0
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


@contextmanager
def waiting(what: str, file: TextIO | None = None) -> Iterator[None]:
    """Name what is awaited and count its seconds, which nothing else shows while it starts."""
    file = file or sys.stdout
    on_terminal = file.isatty()
    begun = time.monotonic()
    ended = threading.Event()

    def show(text: str) -> None:
        seconds = f"{what}: {time.monotonic() - begun:.0f} s"
        file.write(f"\r{seconds}{text}" if on_terminal else f"{seconds}{text}\n")
        file.flush()

    def count() -> None:
        while not ended.wait(1.0 if on_terminal else WAIT_LOG_EVERY_S):
            show("" if on_terminal else ", still waiting")

    counter = threading.Thread(target=count, name="waiting", daemon=True)
    counter.start()
    try:
        yield
    finally:
        ended.set()
        counter.join()
        show("\n" if on_terminal else "")
