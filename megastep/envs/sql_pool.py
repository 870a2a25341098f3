"""Queries in processes of their own: what a model writes can use up neither the driver's memory nor its time.

    rows = run_query(Path("shop.sqlite"), "SELECT 1", timeout_s=5.0, max_rows=20)

Processes are started as they are needed and used again. Quick queries share MOST places. One that takes longer than
QUANTUM_S gives its place back and goes on beside them with less of the processor, up to MOST_PROCESSES in all: quick
ones do not wait for it to end. Its process is not used again. One that does not answer in time, or dies, is replaced;
one that was gone for no fault of the query costs nobody an answer. They end with the driver: their input does.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megastep.envs import sql_worker
from megastep.errors import EnvError

MOST = max(4, min(16, 2 * (os.cpu_count() or 1)))
_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MOST_PROCESSES = max(2 * MOST, min(64, _MEMORY_BYTES // 4 // sql_worker.HEAP_BYTES))
QUANTUM_S = 0.1
SLOW_NICE = 19
START_TIMEOUT_S = 60.0
LATE_S = 3.0  # after the query's own time; the process itself is through by then

Rows = list[tuple]


class QueryError(ValueError):
    """A query that SQLite refused or that took too much; the model sees the message."""


class _Late(Exception):
    """The process does not answer."""


class _Gone(Exception):
    """The process has died; `status` as subprocess has it, None if that was before it was asked."""

    def __init__(self, status: int | None):
        super().__init__(status)
        self.status = status


class _Worker:
    def __init__(self):
        # By its path: importing it as a part of the package would take longer than a query.
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", sql_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.is_slow = False
        try:
            self._read(START_TIMEOUT_S)
        except (_Late, _Gone):
            self.end()
            raise EnvError("sql: the process for queries does not start") from None

    def ask(self, request: dict, on_slow: Callable[[], None]) -> dict:
        """`on_slow` is called, once at most, when QUANTUM_S have passed without an answer."""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError:
            raise _Gone(None) from None
        if not self._has_output(QUANTUM_S):
            self.is_slow = True
            on_slow()
            os.setpriority(os.PRIO_PROCESS, self.process.pid, SLOW_NICE)
        return json.loads(self._read(request["timeout_s"] + LATE_S), object_hook=_blob)

    def _has_output(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self.process.stdout.fileno(), select.POLLIN)
        return bool(poll.poll(max(timeout_s, 0) * 1000))

    def _read(self, timeout_s: float) -> bytes:
        """A line, without its end."""
        deadline, pieces = time.monotonic() + timeout_s, []
        while not pieces or not pieces[-1].endswith(b"\n"):
            if not self._has_output(deadline - time.monotonic()):
                raise _Late
            piece = os.read(self.process.stdout.fileno(), 1 << 20)
            if not piece:
                raise _Gone(self._status())
            pieces.append(piece)
        return b"".join(pieces)

    def _status(self) -> int:
        """How it ended; its output has, so it does in a moment."""
        try:
            return self.process.wait(LATE_S)
        except subprocess.TimeoutExpired:
            return 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def _blob(value: dict) -> dict | bytes:
    return bytes.fromhex(value["blob"]) if "blob" in value else value


_idle: list[_Worker] = []  # the last one used comes first
_places = threading.BoundedSemaphore(MOST)
_processes = threading.BoundedSemaphore(MOST_PROCESSES)


def run_query(database: Path, query: str, timeout_s: float, max_rows: int) -> Rows:
    """At most `max_rows` rows. Blocks; nothing of the database can be changed, and nothing else be read."""
    if not database.is_file():
        raise EnvError(f"{database}: no such database")
    request = {
        "database": str(database.absolute()),
        "query": query,
        "timeout_s": timeout_s,
        "max_rows": max_rows,
    }
    answer = _answer(request)
    if "error" in answer:
        raise QueryError(answer["error"])
    return [tuple(row) for row in answer["rows"]]


def _answer(request: dict) -> dict:
    late = {"error": f"stopped after {request['timeout_s']:g} s"}
    status = None
    for _ in range(2):  # a process may be gone for reasons of its own
        try:
            return _ask_any(request)
        except _Late:
            return late
        except _Gone as gone:
            status = gone.status
        if status == -signal.SIGALRM:
            return late
        if status in _OUT_OF_MEMORY:
            return {"error": "stopped: it took too much memory"}
    return {"error": f"stopped: its process ended (status {status})"}


_OUT_OF_MEMORY = {
    -signal.SIGKILL,
    -signal.SIGABRT,
    -signal.SIGSEGV,
}  # the kernel, or a library that got none


def _ask_any(request: dict) -> dict:
    with _processes:
        place = _Place()
        try:
            worker = _idle_worker() or _Worker()
            try:
                answer = worker.ask(request, place.leave)
            except BaseException:
                worker.end()
                raise
            if worker.is_slow:
                worker.end()
            else:
                _idle.append(worker)
            return answer
        finally:
            place.leave()


class _Place:
    def __init__(self):
        _places.acquire()
        self._is_taken = True

    def leave(self) -> None:
        if self._is_taken:
            self._is_taken = False
            _places.release()


def _idle_worker() -> _Worker | None:
    while True:
        try:
            worker = _idle.pop()
        except IndexError:
            return None
        if worker.process.poll() is None:
            return worker
        worker.end()  # it died meanwhile


@atexit.register
def end_workers() -> None:
    while _idle:
        _idle.pop().end()
