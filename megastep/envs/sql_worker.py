"""A worker process that runs queries written by a model, one at a time.

`sql_pool` starts it as a script; it imports the standard library only. Each request and response is
a line of JSON:

    {"database": FILE, "query": SQL, "timeout_s": 5, "max_rows": 20}
    {"rows": [[1, "a", null, {"blob": "00ff"}], ...]}       or {"error": "message for the model"}

A query is restricted to SELECT on a read-only connection and a list of functions, with limits on
time, memory, length and result size. The process ends when its stdin closes, or when a query
exceeds its timeout by GRACE_S within one function call, where SQLite does not check the time.
"""

import json
import resource
import signal
import sqlite3
import sys
import time
from urllib.parse import quote

HEAP_BYTES = 128 << 20  # SQLite's heap
PROCESS_BYTES = 512 << 20  # address space
FILE_BYTES = 1 << 20  # file size; only the index of a WAL is written
CELL_BYTES = 1_000_000
RESULT_BYTES = 16_000_000
CHECK_EVERY = 1000  # SQLite instructions between checks of the timeout
GRACE_S = 1.0
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: CELL_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
ACTIONS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
FUNCTIONS = set(
    # scalars
    "abs char coalesce concat concat_ws format glob hex ifnull iif instr length like likelihood "
    "likely lower ltrim max min nullif octet_length printf quote random replace round rtrim sign "
    "soundex substr substring trim typeof unhex unicode unlikely upper zeroblob "
    # dates
    "current_date current_time current_timestamp date datetime julianday strftime time timediff "
    "unixepoch "
    # aggregates and windows
    "avg count cume_dist dense_rank first_value group_concat lag last_value lead median nth_value "
    "ntile percent_rank percentile percentile_cont percentile_disc rank row_number string_agg sum "
    "total "
    # mathematics
    "acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 "
    "log2 mod pi pow power radians sin sinh sqrt tan tanh trunc "
    # JSON
    "-> ->> json json_array json_array_length json_error_position json_extract json_group_array "
    "json_group_object json_insert json_object json_patch json_pretty json_quote json_remove "
    "json_replace json_set json_type json_valid "
    # full-text search, where a database has it
    "bm25 highlight match snippet".split()
)


def authorize(action: int, first: str | None, second: str | None, *_) -> int:
    """SQLite's authorizer callback; for a function, `second` is its name."""
    if action not in ACTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def select(database: str, query: str, timeout_s: float, max_rows: int) -> list[tuple]:
    """At most `max_rows` rows."""
    connection = sqlite3.connect(f"file:{quote(database)}?mode=ro", uri=True)
    try:
        connection.execute("PRAGMA temp_store = MEMORY")
        for limit, value in LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(authorize)
        deadline_s = time.monotonic() + timeout_s
        connection.set_progress_handler(lambda: time.monotonic() > deadline_s, CHECK_EVERY)
        return _fetch(connection.execute(query), max_rows)
    finally:
        connection.close()


def _fetch(cursor: sqlite3.Cursor, max_rows: int) -> list[tuple]:
    rows: list[tuple] = []
    size_bytes = 0
    for row in cursor:
        size_bytes += sum(16 + (len(cell) if isinstance(cell, (str, bytes)) else 0) for cell in row)
        if size_bytes > RESULT_BYTES:
            raise sqlite3.DataError(f"the result has more than {RESULT_BYTES} bytes; select less")
        rows.append(row)
        if len(rows) == max_rows:
            break
    return rows


def answer(request: dict) -> dict:
    try:
        return {"rows": select(**request)}
    except (sqlite3.Error, sqlite3.Warning) as error:
        if "interrupted" in str(error):  # by the progress handler
            return {"error": f"stopped after {request['timeout_s']:g} s"}
        return {"error": str(error)}
    except (ValueError, OverflowError) as error:  # a null character, invalid UTF-8
        return {"error": str(error)}


def reply(request: dict) -> str:
    try:
        return json.dumps(answer(request), default=lambda blob: {"blob": blob.hex()})
    except MemoryError:  # in SQLite or in Python
        return json.dumps({"error": f"out of memory: a query has {HEAP_BYTES >> 20} MB"})


def limit_process() -> None:
    # The heap limit applies to all connections of the process.
    sqlite3.connect(":memory:").execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
    resource.setrlimit(resource.RLIMIT_AS, (PROCESS_BYTES, PROCESS_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def main() -> None:
    limit_process()
    print("{}", flush=True)  # ready
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)
        response = reply(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(response, flush=True)


if __name__ == "__main__":
    main()
