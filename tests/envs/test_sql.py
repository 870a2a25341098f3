"""S17: multi-turn SQL on SQLite files; queries of the model can neither write nor hang."""

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megastep.envs import sql_data, sql_pool, sql_worker
from megastep.envs.scripted import write_conversations
from megastep.envs.sql import SQL, QueryError, run_query, same_rows
from megastep.errors import EnvError
from megastep.rollout.data import read_rows
from tests.processes import alive, descendants

NO_IDS = np.array([], np.int32)
FOREVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sql")
    sql_data.write(folder, databases=3, questions=60, seed=0)
    return folder


@pytest.fixture
def database(data):
    return data / "databases" / "shop_0.sqlite"


def make(data, gold="SELECT name FROM product WHERE id = 1", **options) -> SQL:
    row = {"question": "What is the first product?", "database": "shop_0.sqlite", "sql": gold}
    return SQL(row, databases=str(data / "databases"), **options)


def turns(env, *texts):
    async def run():
        return [await env.step(text, NO_IDS) for text in texts]

    return asyncio.run(run())


def test_s17_an_episode_of_several_turns(data):
    env = make(data)
    (message,) = asyncio.run(env.start())
    assert (
        "CREATE TABLE product" in message["content"]
        and "What is the first product?" in message["content"]
    )
    looked, wrong, hint, solved = turns(
        env,
        "<think>look first, not <solution>this</solution></think>"
        "<sql>SELECT id, name FROM product LIMIT 1</sql>",
        "<sql>SELECT colour FROM product</sql>",
        "I do not know.",
        "<solution>SELECT name FROM product ORDER BY id LIMIT 1</solution>",
    )
    assert looked.observation == [{"role": "user", "content": "1 | lamp"}] and not looked.done
    assert wrong.observation[0]["content"] == "error: no such column: colour"
    assert hint.observation[0]["content"].startswith("error: write a query as <sql>")
    assert solved.done and solved.reward == 1
    assert solved.metrics == {"success": True, "queries": 2, "query_errors": 1}


@pytest.mark.parametrize(
    "solution", ["SELECT name FROM product WHERE id = 2", "SELEC", "", FOREVER]
)
def test_s17_a_wrong_solution_has_reward_0(data, solution):
    (outcome,) = turns(make(data, query_timeout_s=0.2), f"<solution>{solution}</solution>")
    assert outcome.done and outcome.reward == 0 and not outcome.metrics["success"]


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM product",
        "DROP TABLE product",
        "UPDATE product SET price = 0",
        "CREATE TABLE t (x)",
        "VACUUM",
        "INSERT INTO product (name) VALUES ('x')",
        "PRAGMA query_only = OFF",
        "ATTACH DATABASE '/tmp/x.sqlite' AS x",
        "SELECT 1; DELETE FROM product",
        "CREATE TEMP TABLE t (x)",
        "SELECT load_extension('x')",
        "BEGIN EXCLUSIVE",
    ],
)
def test_s17_queries_can_only_read(database, query):
    before = hashlib.sha256(database.read_bytes()).hexdigest()
    with pytest.raises(QueryError):
        run_query(database, query, 5.0, 10)
    assert hashlib.sha256(database.read_bytes()).hexdigest() == before


def test_s17_the_connection_itself_is_read_only(database, monkeypatch):
    monkeypatch.setattr(sql_worker, "ACTIONS", set(range(100)))
    request = {
        "database": str(database),
        "query": "DELETE FROM product",
        "timeout_s": 5.0,
        "max_rows": 10,
    }
    assert sql_worker.answer(request) == {"error": "attempt to write a readonly database"}


def test_s17_an_endless_query_is_stopped(database):
    begin = time.monotonic()
    with pytest.raises(QueryError, match="stopped after 0.2 s"):
        run_query(database, FOREVER, 0.2, 10)
    assert time.monotonic() - begin < 2


WITHIN_A_FUNCTION = (
    "SELECT instr(replace(hex(zeroblob(499000)), '0', 'a'), "
    "replace(hex(zeroblob(240000)), '0', 'a') || 'b')"
)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
GREEDY = [
    ENDLESS + "SELECT zeroblob(999999) FROM n",
    ENDLESS + "SELECT hex(zeroblob(400000)) FROM n ORDER BY 1",
    ENDLESS + "SELECT json_group_array(printf('%9999d', i)) FROM n",
    "SELECT " + ", ".join(["zeroblob(999999)"] * 1000),
    "SELECT " + ", ".join(["zeroblob(999999)"] * 400),
    "SELECT " + ", ".join(["printf('%999999d', 1)"] * 400),
]


def peak_mb(process: int | str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (line,) = [line for line in lines if "VmHWM" in line]
    return int(line.split()[1]) >> 10


@pytest.mark.parametrize("query", GREEDY, ids=range(len(GREEDY)))
def test_d2_a_query_without_memory_is_stopped_and_the_episode_continues(data, query, monkeypatch):
    """In the driver, one of these took 3 GB, another 4."""
    monkeypatch.setattr(sql_pool, "QUANTUM_S", 60.0)  # its worker stays idle and can be inspected
    env = make(data, query_timeout_s=10.0)
    before = peak_mb("self")
    greedy, after, solved = turns(
        env,
        f"<sql>{query}</sql>",
        "<sql>SELECT 1</sql>",
        "<solution>SELECT name FROM product ORDER BY id LIMIT 1</solution>",
    )
    assert greedy.observation[0]["content"].startswith("error: ") and not greedy.done
    assert after.observation[0]["content"] == "1" and solved.reward == 1
    assert solved.metrics["query_errors"] == 1
    assert peak_mb("self") - before < 50
    assert max(peak_mb(worker.process.pid) for worker in sql_pool._idle) < 300


def test_d2_a_query_that_hangs_within_a_function_is_stopped(database):
    """SQLite checks the time between instructions only: the worker ends and is replaced."""
    begin = time.monotonic()
    with pytest.raises(QueryError, match="stopped after 0.1 s"):
        run_query(database, WITHIN_A_FUNCTION, 0.1, 10)
    assert time.monotonic() - begin < 3
    assert run_query(database, "SELECT 1", 5.0, 10) == [(1,)]


def test_d2_a_worker_that_died_while_idle_is_replaced(database):
    run_query(database, "SELECT 1", 5.0, 10)
    worker = sql_pool._idle[-1]
    worker.process.kill()
    worker.process.wait()
    assert run_query(database, "SELECT 1", 5.0, 10) == [(1,)] and worker not in sql_pool._idle


@pytest.mark.parametrize(
    "number, answer",
    [
        (signal.SIGTERM, [(1,)]),
        (signal.SIGHUP, [(1,)]),
        (signal.SIGKILL, "stopped: it took too much memory"),
        (signal.SIGABRT, "stopped: it took too much memory"),
        (signal.SIGALRM, "stopped after 5 s"),
    ],
)
def test_d2_a_query_is_retried_unless_it_caused_the_death_of_its_worker(database, number, answer):
    """A process in the worker's place reads the request and dies of the signal."""
    run_query(database, "SELECT 1", 5.0, 10)
    worker = sql_pool._idle[-1]
    worker.end()
    script = f"import os; input(); os.kill(os.getpid(), {int(number)})"
    worker.process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    if isinstance(answer, list):
        assert run_query(database, "SELECT 1", 5.0, 10) == answer
    else:
        with pytest.raises(QueryError, match=answer):
            run_query(database, "SELECT 1", 5.0, 10)
    assert worker not in sql_pool._idle and run_query(database, "SELECT 1", 5.0, 10) == [(1,)]


def test_d2_the_worker_process_has_a_memory_limit(database):
    """SQLite's own limit excludes, for example, the rows as Python objects."""
    run_query(database, "SELECT 1", 5.0, 10)
    limits = Path(f"/proc/{sql_pool._idle[-1].process.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert line.split()[3] == str(sql_worker.PROCESS_BYTES)


@pytest.mark.parametrize(
    "function",
    [
        "load_extension('x')",
        "fts3_tokenizer('x')",
        "randomblob(9)",
        "sqlite_version()",
        "sqlite_compileoption_get(1)",
        "readfile('/etc/passwd')",
        "writefile('/tmp/x', 'y')",
        "edit('x')",
        "last_insert_rowid()",
        "sqlite_log(1, 'x')",
    ],
)
def test_d2_functions_that_are_not_on_the_list(database, function):
    with pytest.raises(QueryError, match="not authorized to use function|no such function"):
        run_query(database, f"SELECT {function}", 5.0, 1)


@pytest.mark.parametrize(
    "expression, value",
    [
        ("count(*) FROM product", 8),
        ("upper('a') || substr('bcd', 2)", "Acd"),
        ("round(2.5) + abs(-1)", 4.0),
        ("strftime('%Y', '2024-05-01')", "2024"),
        ("CAST(julianday('2024-01-02') - julianday('2024-01-01') AS INT)", 1),
        ("sum(x) OVER (ORDER BY x) FROM (SELECT 3 AS x)", 3),
        ("json_extract('{\"a\": 5}', '$.a')", 5),
        ("'{\"a\": 6}' ->> 'a'", 6),
        ("iif(1 LIKE '1', coalesce(NULL, 'x'), 'y')", "x"),
        ("x'00ff'", b"\x00\xff"),
        ("9e999", float("inf")),
        ("group_concat(x, '-') FROM (SELECT 1 AS x UNION SELECT 2)", "1-2"),
        ("NULL", None),
        ("sqrt(16) + pow(2, 3)", 12.0),
        ("9223372036854775807", 2**63 - 1),
        ("char(55357, 56832) IS NOT NULL", 1),
    ],
)
def test_d2_allowed_expressions(database, expression, value):
    assert run_query(database, f"SELECT {expression}", 5.0, 1) == [(value,)]


def test_d2_workers_are_reused_and_bounded(data):
    sql_pool.end_workers()

    async def run():
        envs = [make(data) for _ in range(40)]
        return await asyncio.gather(
            *[env.step("<sql>SELECT count(*) FROM product</sql>", NO_IDS) for env in envs]
        )

    outcomes = asyncio.run(run())
    assert all(outcome.observation[0]["content"] == "8" for outcome in outcomes)
    asyncio.run(run())
    assert 1 <= len(sql_pool._idle) <= sql_pool.MAX_QUICK


def test_d2_workers_end_with_a_killed_driver(database):
    """Their stdin closes."""
    script = f"""
import os, signal
from pathlib import Path
from megastep.envs import sql_pool
sql_pool.run_query(Path({str(database)!r}), "SELECT 1", 5.0, 1)
print(sql_pool._idle[-1].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    worker = Path(f"/proc/{int(run.stdout)}")
    deadline = time.monotonic() + 10
    while (
        worker.exists()
        and "zombie" not in (worker / "status").read_text()
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert not worker.exists() or "zombie" in (worker / "status").read_text()


def running() -> set:
    """Worker processes of this one."""
    return {p for p in descendants(os.getpid()) if any("sql_worker" in line for line in alive({p}))}


def test_s17_slow_queries_do_not_block_other_episodes(data):
    """More of them than slots; 20 s is much longer than anything else here."""

    async def run():
        slow = [
            asyncio.create_task(
                make(data, query_timeout_s=20.0).step(f"<sql>{FOREVER}</sql>", NO_IDS)
            )
            for _ in range(2 * sql_pool.MAX_QUICK)
        ]
        while len(running()) < len(slow) or sql_pool._quick_slots._value < sql_pool.MAX_QUICK:
            assert not any(task.done() for task in slow)
            await asyncio.sleep(0.02)
        quick = await make(data).step("<sql>SELECT 1</sql>", NO_IDS)
        still_slow = sum(not task.done() for task in slow)
        for pid, _ in running():
            os.kill(pid, signal.SIGALRM)
        return (
            quick.observation[0]["content"],
            still_slow,
            [(await task).observation[0]["content"] for task in slow],
        )

    sql_pool.end_workers()
    quick, still_slow, shown = asyncio.run(run())
    assert quick == "1" and still_slow == len(shown) and set(shown) == {"error: stopped after 20 s"}
    assert len(sql_pool._idle) <= 1  # workers of slow queries are not reused


def test_s17_slow_queries_are_bounded(data, monkeypatch):
    monkeypatch.setattr(sql_pool, "_processes", threading.BoundedSemaphore(2))
    sql_pool.end_workers()
    most = 0

    async def run():
        nonlocal most
        slow = [
            asyncio.create_task(
                make(data, query_timeout_s=0.4).step(f"<sql>{FOREVER}</sql>", NO_IDS)
            )
            for _ in range(5)
        ]
        while not all(task.done() for task in slow):
            most = max(most, len(running()))
            await asyncio.sleep(0.02)
        return [task.result().observation[0]["content"] for task in slow]

    assert asyncio.run(run()) == ["error: stopped after 0.4 s"] * 5
    assert 1 <= most <= 2


def test_results_are_shortened(data):
    many, wide, none = turns(
        make(data, shown_rows=2, shown_characters=100),
        "<sql>SELECT id FROM purchase</sql>",
        "<sql>SELECT replace(hex(zeroblob(500)), '0', 'ab')</sql>",
        "<sql>SELECT 1 WHERE 0</sql>",
    )
    assert many.observation[0]["content"] == "1\n2\n... (only the first 2 rows are shown)"
    assert (
        len(wide.observation[0]["content"]) < 150
        and "more characters)" in wide.observation[0]["content"]
    )
    assert none.observation[0]["content"] == "(no rows)"


def test_a_huge_cell_is_rejected(database):
    with pytest.raises(QueryError, match="too big"):
        run_query(database, "SELECT zeroblob(2000000)", 5.0, 1)


def test_rows_are_compared_as_a_multiset_unless_ordered():
    assert same_rows([(1,), (2,)], [(2,), (1,)], ordered=False)
    assert not same_rows([(1,), (2,)], [(2,), (1,)], ordered=True)
    assert not same_rows([(1,), (1,)], [(1,)], ordered=False)
    assert same_rows([(0.1 + 0.2, None, "a")], [(0.3, None, "a")], ordered=True)
    assert not same_rows([(1, 2)], [(2, 1)], ordered=False)


def test_order_counts_where_the_reference_query_orders(data):
    gold = "SELECT name FROM product ORDER BY price"
    (other,) = turns(
        make(data, gold), "<solution>SELECT name FROM product ORDER BY price DESC</solution>"
    )
    (same,) = turns(
        make(data, gold), "<solution>SELECT name FROM product ORDER BY price</solution>"
    )
    assert (other.reward, same.reward) == (0, 1)


def test_errors_of_the_data_set_fail_the_episode(data):
    with pytest.raises(EnvError, match="the data set's own query fails: no such table: nowhere"):
        turns(make(data, "SELECT * FROM nowhere"), "<solution>SELECT 1</solution>")
    env = SQL({"question": "?", "database": "none.sqlite", "sql": "SELECT 1"}, databases=str(data))
    with pytest.raises(EnvError, match="none.sqlite: no such database"):
        asyncio.run(env.start())


def test_generated_questions_are_answered_by_their_queries(data):
    for split in ("train", "eval"):
        rows = read_rows(str(data / f"{split}.jsonl"), SQL, 0, 0)
        asked = {"train": {"shop_0.sqlite", "shop_1.sqlite"}, "eval": {"shop_2.sqlite"}}
        assert {r["database"] for r in rows} == asked[split]
        for row in rows:
            (outcome,) = turns(
                SQL(row, databases=str(data / "databases")), f"<solution>{row['sql']}</solution>"
            )
            assert outcome.reward == 1, row


def test_the_same_seed_writes_the_same_data(data, tmp_path):
    sql_data.write(tmp_path, databases=3, questions=60, seed=0)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_text() == (data / name).read_text()
    path = "databases/shop_1.sqlite"
    written = list(sqlite3.connect(tmp_path / path).iterdump())
    assert written == list(sqlite3.connect(data / path).iterdump())


def test_s17_demonstrations_have_all_kinds_of_questions(data, tmp_path):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    kinds = len(sql_data.QUESTIONS)
    sql_data.write_demonstrations(tmp_path, 2 * kinds)
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    queries = [json.loads(line)["messages"][1]["content"] for line in lines]
    shapes = [re.sub(r"'\w+'|\d+", "_", query) for query in queries]
    assert len(set(shapes[:kinds])) == len(set(shapes)) == kinds


def test_s17_demonstrations_look_at_the_rows_before_the_solution(data, tmp_path):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    sql_data.write_demonstrations(tmp_path, 12)
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    conversations = [json.loads(line)["messages"] for line in lines]
    assert len(conversations) == 12 and len({m[0]["content"] for m in conversations}) > 3
    for _, look, rows, solution in conversations:
        assert look["content"].startswith("<sql>SELECT")
        assert rows["role"] == "user" and not rows["content"].startswith("error")
        assert solution["content"] == look["content"].replace("sql>", "solution>")


def test_a_scripted_episode_without_reward_is_an_error(data, tmp_path):
    row = json.loads((data / "train.jsonl").read_text().splitlines()[0])
    env = SQL(row, databases=str(data / "databases"))
    with pytest.raises(ValueError, match="an episode has reward 0"):
        asyncio.run(write_conversations(tmp_path / "x.jsonl", [(env, ["<solution>x</solution>"])]))
    assert not list(tmp_path.iterdir())
