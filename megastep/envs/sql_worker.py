"""A process that runs queries which a model has written, one after another.

Started by `sql_pool` as a script of its own, on the standard library alone. A line of JSON in, a line of JSON out:

    {"database": FILE, "query": SQL, "timeout_s": 5, "max_rows": 20}
    {"rows": [[1, "a", null, {"blob": "00ff"}], ...]}       or {"error": "what the model is told"}

What a query can do is bounded: it selects on a read-only connection, calls functions of a list, and has limits of
time, memory, length and result. The process ends when its input does, or when a query outlives its time by a second
within one call of a function, where SQLite does not look at the clock.
"""

import json
import resource
import signal
import sqlite3
import sys
import time
from urllib.parse import quote

HEAP_BYTES = 128 << 20  # of SQLite
PROCESS_BYTES = 512 << 20  # of the whole process
FILE_BYTES = 1 << 20  # it writes none but the index of a WAL
CELL_BYTES = 1_000_000
RESULT_BYTES = 16_000_000
CHECK_EVERY = 1000  # instructions of SQLite's machine between looks at the clock
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
    "abs char coalesce concat concat_ws format glob hex ifnull iif instr length like likelihood likely lower ltrim max "
    "min nullif octet_length printf quote random replace round rtrim sign soundex substr substring trim typeof unhex "
    "unicode unlikely upper zeroblob "
    # dates
    "current_date current_time current_timestamp date datetime julianday strftime time timediff unixepoch "
    # aggregates and windows
    "avg count cume_dist dense_rank first_value group_concat lag last_value lead median nth_value ntile percent_rank "
    "percentile percentile_cont percentile_disc rank row_number string_agg sum total "
    # mathematics
    "acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2 mod pi pow power "
    "radians sin sinh sqrt tan tanh trunc "
    # JSON
    "-> ->> json json_array json_array_length json_error_position json_extract json_group_array json_group_object "
    "json_insert json_object json_patch json_pretty json_quote json_remove json_replace json_set json_type json_valid "
    # full-text search, where a database has it
    "bm25 highlight match snippet".split()
)


def permits(action: int, first: str | None, second: str | None, *_) -> int:
    if action not in ACTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def select(database: str, query: str, timeout_s: float, max_rows: int) -> list[tuple]:
    """At most `max_rows` rows. Nothing of the database can be changed, and nothing else be read."""
    connection = sqlite3.connect(f"file:{quote(database)}?mode=ro", uri=True)
    try:
        connection.execute("PRAGMA temp_store = MEMORY")
        for limit, value in LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(permits)
        deadline = time.monotonic() + timeout_s
        connection.set_progress_handler(lambda: time.monotonic() > deadline, CHECK_EVERY)
        return _fetched(connection.execute(query), max_rows)
    finally:
        connection.close()


def _fetched(cursor: sqlite3.Cursor, max_rows: int) -> list[tuple]:
    rows, size = [], 0
    for row in cursor:
        size += sum(16 + (len(cell) if isinstance(cell, (str, bytes)) else 0) for cell in row)
        if size > RESULT_BYTES:
            raise sqlite3.DataError(f"the result has more than {RESULT_BYTES} bytes; select less")
        rows.append(row)
        if len(rows) == max_rows:
            break
    return rows


def answer(request: dict) -> dict:
    try:
        return {"rows": select(**request)}
    except (sqlite3.Error, sqlite3.Warning) as error:
        late = "interrupted" in str(error)
        return {"error": f"stopped after {request['timeout_s']:g} s" if late else str(error)}
    except (ValueError, OverflowError) as error:  # a null character, text that is no UTF-8
        return {"error": str(error)}


def reply(request: dict) -> str:
    try:
        return json.dumps(answer(request), default=lambda blob: {"blob": blob.hex()})
    except MemoryError:  # of SQLite, or of what Python makes of its rows
        return json.dumps({"error": f"out of memory: a query has {HEAP_BYTES >> 20} MB"})


def limit_process() -> None:
    sqlite3.connect(":memory:").execute(
        f"PRAGMA hard_heap_limit = {HEAP_BYTES}"
    )  # of all connections
    for limit, value in (
        (resource.RLIMIT_AS, PROCESS_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def main() -> None:
    limit_process()
    print("{}", flush=True)  # ready
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)
        made = reply(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(made, flush=True)


if __name__ == "__main__":
    main()
