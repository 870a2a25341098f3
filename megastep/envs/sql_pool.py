"""Queries in processes of their own: what a model writes can use up neither the driver's memory nor its time.

    rows = run_query(Path("shop.sqlite"), "SELECT 1", timeout_s=5.0, max_rows=20)

Processes are started as they are needed, at most MOST of them, and used again. One that does not answer in time, or
dies, is replaced. They end with the driver: their input does.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from megastep.envs import sql_worker
from megastep.rollout.env import EnvError

MOST = max(4, min(16, 2 * (os.cpu_count() or 1)))
START_TIMEOUT_S = 60.0
LATE_S = 3.0  # after the query's own time; the process itself is through by then

Rows = list[tuple]


class QueryError(ValueError):
    """A query that SQLite refused or that took too much; the model sees the message."""


class _Lost(Exception):
    """The process has died, or does not answer."""


class _Worker:
    def __init__(self):
        # By its path: importing it as a part of the package would take longer than a query.
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", sql_worker.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0,
        )
        try:
            self._read(START_TIMEOUT_S)
        except _Lost:
            self.end()
            raise EnvError("sql: the process for queries does not start") from None

    def ask(self, request: dict, timeout_s: float) -> dict:
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError:
            raise _Lost from None
        return json.loads(self._read(timeout_s), object_hook=_blob)

    def _read(self, timeout_s: float) -> bytes:
        """A line, without its end."""
        deadline, pieces = time.monotonic() + timeout_s, []
        output = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while not pieces or not pieces[-1].endswith(b"\n"):
            left_ms = max(deadline - time.monotonic(), 0) * 1000
            piece = os.read(output, 1 << 20) if poll.poll(left_ms) else b""
            if not piece:
                raise _Lost
            pieces.append(piece)
        return b"".join(pieces)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def _blob(value: dict) -> dict | bytes:
    return bytes.fromhex(value["blob"]) if "blob" in value else value


_idle: list[_Worker] = []  # the last one used comes first
_places = threading.BoundedSemaphore(MOST)


def run_query(database: Path, query: str, timeout_s: float, max_rows: int) -> Rows:
    """At most `max_rows` rows. Blocks; nothing of the database can be changed, and nothing else be read."""
    if not database.is_file():
        raise EnvError(f"{database}: no such database")
    request = {"database": str(database.absolute()), "query": query, "timeout_s": timeout_s, "max_rows": max_rows}
    with _places:
        answer = _ask_any(request)
    if "error" in answer:
        raise QueryError(answer["error"])
    return [tuple(row) for row in answer["rows"]]


def _ask_any(request: dict) -> dict:
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    begin = time.monotonic()
    try:
        answer = worker.ask(request, request["timeout_s"] + LATE_S)
    except _Lost:
        worker.end()
        late = time.monotonic() - begin >= request["timeout_s"]
        return {"error": f"stopped after {request['timeout_s']:g} s" if late else "stopped: it took too much memory"}
    _idle.append(worker)
    return answer


@atexit.register
def end_workers() -> None:
    while _idle:
        _idle.pop().end()
