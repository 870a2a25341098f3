"""Queries in worker processes, so that SQL of a model cannot exhaust the driver's memory or time.

    rows = run_query(Path("shop.sqlite"), "SELECT 1", timeout_s=5.0, max_rows=20)

Workers are started on demand and reused. Quick queries share MAX_QUICK slots. A query that takes
longer than QUANTUM_S releases its slot and continues at a lower priority, with at most
MAX_PROCESSES workers in all, so that quick queries do not wait for it; its worker is not reused. A
worker that does not answer in time, or dies, is replaced; if the query did not cause its death, the
query is retried. Workers end with the driver, which closes their stdin.
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
from typing import IO, cast

from megastep.envs import sql_worker
from megastep.errors import EnvError

MAX_QUICK = max(4, min(16, 2 * (os.cpu_count() or 1)))
_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MAX_PROCESSES = max(2 * MAX_QUICK, min(64, _MEMORY_BYTES // 4 // sql_worker.HEAP_BYTES))
QUANTUM_S = 0.1
SLOW_NICE = 19
START_TIMEOUT_S = 60.0
LATE_S = 3.0  # grace beyond the query's timeout; the worker stops the query earlier

ResultRows = list[tuple]


class QueryError(ValueError):
    """A query that SQLite rejected or that exceeded a limit; the model sees the message."""


class _Late(Exception):
    """The worker does not answer."""


class _Died(Exception):
    """The worker died; `status`: its return code, None if it died before the request."""

    def __init__(self, status: int | None):
        super().__init__(status)
        self.status = status


class _Worker:
    def __init__(self):
        # By path: importing the package would take longer than a query.
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
        except (_Late, _Died):
            self.end()
            raise EnvError("sql: the query process does not start") from None

    # `process` is always started with pipes.
    @property
    def _stdin(self) -> IO[bytes]:
        return cast(IO[bytes], self.process.stdin)

    @property
    def _stdout(self) -> IO[bytes]:
        return cast(IO[bytes], self.process.stdout)

    def ask(self, request: dict, on_slow: Callable[[], None]) -> dict:
        """Calls `on_slow`, at most once, after QUANTUM_S without an answer."""
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
        except OSError:
            raise _Died(None) from None
        if not self._has_output(QUANTUM_S):
            self.is_slow = True
            on_slow()
            os.setpriority(os.PRIO_PROCESS, self.process.pid, SLOW_NICE)
        return json.loads(self._read(request["timeout_s"] + LATE_S), object_hook=_blob)

    def _has_output(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._stdout.fileno(), select.POLLIN)
        return bool(poll.poll(max(timeout_s, 0) * 1000))

    def _read(self, timeout_s: float) -> bytes:
        """One line."""
        deadline_s = time.monotonic() + timeout_s
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            if not self._has_output(deadline_s - time.monotonic()):
                raise _Late
            piece = os.read(self._stdout.fileno(), 1 << 20)
            if not piece:
                raise _Died(self._status())
            pieces.append(piece)
        return b"".join(pieces)

    def _status(self) -> int:
        """The return code of a worker that has closed its output and is about to end."""
        try:
            return self.process.wait(LATE_S)
        except subprocess.TimeoutExpired:
            return 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()


def _blob(value: dict) -> dict | bytes:
    return bytes.fromhex(value["blob"]) if "blob" in value else value


_idle: list[_Worker] = []  # a stack: the last one used is reused first
_quick_slots = threading.BoundedSemaphore(MAX_QUICK)
_processes = threading.BoundedSemaphore(MAX_PROCESSES)


def run_query(database: Path, query: str, timeout_s: float, max_rows: int) -> ResultRows:
    """At most `max_rows` rows. Blocks. The query can neither write nor read other files."""
    if not database.is_file():
        raise EnvError(f"{database}: no such database")
    request = {
        "database": str(database.absolute()),
        "query": query,
        "timeout_s": timeout_s,
        "max_rows": max_rows,
    }
    answer = _ask_twice(request)
    if "error" in answer:
        raise QueryError(answer["error"])
    return [tuple(row) for row in answer["rows"]]


def _ask_twice(request: dict) -> dict:
    """A worker may die for reasons other than the query: ask another one."""
    late = {"error": f"stopped after {request['timeout_s']:g} s"}
    status = None
    for _ in range(2):
        try:
            return _ask(request)
        except _Late:
            return late
        except _Died as died:
            status = died.status
        if status == -signal.SIGALRM:
            return late
        if status in _OUT_OF_MEMORY:
            return {"error": "stopped: it took too much memory"}
    return {"error": f"stopped: its process ended (status {status})"}


# By the kernel, or by a library whose allocation failed.
_OUT_OF_MEMORY = {-signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV}


def _ask(request: dict) -> dict:
    with _processes:
        slot = _QuickSlot()
        try:
            worker = _idle_worker() or _Worker()
            try:
                answer = worker.ask(request, slot.release)
            except BaseException:
                worker.end()
                raise
            if worker.is_slow:
                worker.end()
            else:
                _idle.append(worker)
            return answer
        finally:
            slot.release()


class _QuickSlot:
    def __init__(self):
        _quick_slots.acquire()
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            _quick_slots.release()


def _idle_worker() -> _Worker | None:
    while True:
        try:
            worker = _idle.pop()
        except IndexError:
            return None
        if worker.process.poll() is None:
            return worker
        worker.end()  # it died while idle


@atexit.register
def end_workers() -> None:
    while _idle:
        _idle.pop().end()
