"""S17: multi-turn SQL on real SQLite files; what the model writes can neither change nor hang anything."""

import asyncio
import hashlib
import sqlite3
import time

import numpy as np
import pytest

from megastep.envs import sql_data
from megastep.envs.sql import SQL, QueryError, run_query, same_rows
from megastep.rollout.data import read_rows
from megastep.rollout.env import EnvError

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
    assert "CREATE TABLE product" in message["content"] and "What is the first product?" in message["content"]
    looked, wrong, hint, solved = turns(
        env,
        "<think>look first, not <solution>this</solution></think><sql>SELECT id, name FROM product LIMIT 1</sql>",
        "<sql>SELECT colour FROM product</sql>",
        "I do not know.",
        "<solution>SELECT name FROM product ORDER BY id LIMIT 1</solution>",
    )
    assert looked.observation == [{"role": "user", "content": "1 | lamp"}] and not looked.done
    assert wrong.observation[0]["content"] == "error: no such column: colour"
    assert hint.observation[0]["content"].startswith("error: write a query as <sql>")
    assert solved.done and solved.reward == 1
    assert solved.metrics == {"success": True, "queries": 2, "query_errors": 1}


@pytest.mark.parametrize("solution", ["SELECT name FROM product WHERE id = 2", "SELEC", "", FOREVER])
def test_s17_a_wrong_solution_is_worth_nothing(data, solution):
    (outcome,) = turns(make(data, query_timeout_s=0.2), f"<solution>{solution}</solution>")
    assert outcome.done and outcome.reward == 0 and not outcome.metrics["success"]


@pytest.mark.parametrize("query", [
    "DELETE FROM product", "DROP TABLE product", "UPDATE product SET price = 0", "CREATE TABLE t (x)", "VACUUM",
    "INSERT INTO product (name) VALUES ('x')", "PRAGMA query_only = OFF", "ATTACH DATABASE '/tmp/x.sqlite' AS x",
    "SELECT 1; DELETE FROM product", "CREATE TEMP TABLE t (x)", "SELECT load_extension('x')", "BEGIN EXCLUSIVE",
])
def test_s17_queries_may_read_and_nothing_else(database, query):
    before = hashlib.sha256(database.read_bytes()).hexdigest()
    with pytest.raises(QueryError):
        run_query(database, query, 5.0, 10)
    assert hashlib.sha256(database.read_bytes()).hexdigest() == before


def test_s17_the_connection_itself_is_read_only(database, monkeypatch):
    monkeypatch.setattr("megastep.envs.sql._ALLOWED", set(range(100)))
    with pytest.raises(QueryError, match="attempt to write a readonly database"):
        run_query(database, "DELETE FROM product", 5.0, 10)


def test_s17_a_query_that_never_ends_is_stopped(database):
    begin = time.monotonic()
    with pytest.raises(QueryError, match="stopped after 0.2 s"):
        run_query(database, FOREVER, 0.2, 10)
    assert time.monotonic() - begin < 2


def test_s17_a_slow_query_does_not_hold_up_other_episodes(data):
    async def run():
        begin = time.monotonic()
        slow = asyncio.create_task(make(data, query_timeout_s=1.0).step(f"<sql>{FOREVER}</sql>", NO_IDS))
        await asyncio.sleep(0.05)
        await make(data).step("<sql>SELECT 1</sql>", NO_IDS)
        took = time.monotonic() - begin
        return took, slow.done(), (await slow).observation[0]["content"]

    took, slow_was_done, shown = asyncio.run(run())
    assert took < 0.9 and not slow_was_done and shown == "error: stopped after 1 s"


def test_results_are_shortened(data):
    many, wide, none = turns(
        make(data, shown_rows=2, shown_characters=100), "<sql>SELECT id FROM purchase</sql>",
        "<sql>SELECT replace(hex(zeroblob(500)), '0', 'ab')</sql>", "<sql>SELECT 1 WHERE 0</sql>",
    )
    assert many.observation[0]["content"] == "1\n2\n... (only the first 2 rows are shown)"
    assert len(wide.observation[0]["content"]) < 150 and "more characters)" in wide.observation[0]["content"]
    assert none.observation[0]["content"] == "(no rows)"


def test_a_huge_cell_is_refused(database):
    with pytest.raises(QueryError, match="too big"):
        run_query(database, "SELECT zeroblob(2000000)", 5.0, 1)


def test_rows_are_compared_as_a_bag_unless_ordered():
    assert same_rows([(1,), (2,)], [(2,), (1,)], ordered=False)
    assert not same_rows([(1,), (2,)], [(2,), (1,)], ordered=True)
    assert not same_rows([(1,), (1,)], [(1,)], ordered=False)
    assert same_rows([(0.1 + 0.2, None, "a")], [(0.3, None, "a")], ordered=True)
    assert not same_rows([(1, 2)], [(2, 1)], ordered=False)


def test_order_counts_where_the_answer_is_ordered(data):
    gold = "SELECT name FROM product ORDER BY price"
    (other,) = turns(make(data, gold), "<solution>SELECT name FROM product ORDER BY price DESC</solution>")
    (same,) = turns(make(data, gold), "<solution>SELECT name FROM product ORDER BY price</solution>")
    assert (other.reward, same.reward) == (0, 1)


def test_mistakes_of_the_data_set_are_not_the_models(data):
    with pytest.raises(EnvError, match="the data set's own query fails: no such table: nowhere"):
        turns(make(data, "SELECT * FROM nowhere"), "<solution>SELECT 1</solution>")
    env = SQL({"question": "?", "database": "none.sqlite", "sql": "SELECT 1"}, databases=str(data))
    with pytest.raises(EnvError, match="none.sqlite: no such database"):
        asyncio.run(env.start())


def test_the_shipped_questions_are_answered_by_their_own_queries(data):
    for split in ("train", "eval"):
        rows = read_rows(str(data / f"{split}.jsonl"), SQL, 0, 0)
        asked = {"train": {"shop_0.sqlite", "shop_1.sqlite"}, "eval": {"shop_2.sqlite"}}
        assert {r["database"] for r in rows} == asked[split]
        for row in rows:
            (outcome,) = turns(SQL(row, databases=str(data / "databases")), f"<solution>{row['sql']}</solution>")
            assert outcome.reward == 1, row


def test_the_same_seed_writes_the_same_data(data, tmp_path):
    sql_data.write(tmp_path, databases=3, questions=60, seed=0)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_text() == (data / name).read_text()
    dump = ["\n".join(sqlite3.connect(f / "databases/shop_1.sqlite").iterdump()) for f in (tmp_path, data)]
    assert dump[0] == dump[1]
