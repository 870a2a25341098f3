"""SQL of a model: any query returns rows or an error, and the episode continues."""

import asyncio
import sqlite3

import numpy as np
import pytest

from megastep.envs import sql_data
from megastep.envs.sql import SQL
from megastep.errors import EnvError

NO_IDS = np.array([], np.int32)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sql")
    sql_data.write(folder, databases=2, questions=4, seed=0)
    return folder / "databases"


def make(folder, database="shop_0.sqlite", gold="SELECT 1") -> SQL:
    row = {"question": "?", "database": database, "sql": gold}
    return SQL(row, databases=str(folder), query_timeout_s=0.5)


def step(env, text: str):
    return asyncio.run(env.step(text, NO_IDS))


ERRORS = [
    "x",
    "SELEC",
    "SELECT",
    "SELECT FROM",
    "SELECT * FROM",
    "SELECT * FROM nowhere",
    "SELECT (",
    "SELECT 1; SELECT 2",
    "SELECT 'a",
    'SELECT "',
    "\0",
    "SELECT '\0'",
    "SELECT 1\0",
    "\ud800",
    "SELECT '\ud800'",
    "DROP TABLE product",
    "DELETE FROM product",
    "UPDATE product SET price = 0",
    "INSERT INTO product VALUES (1)",
    "CREATE TABLE t (x)",
    "CREATE TEMP TABLE t (x)",
    "CREATE VIRTUAL TABLE t USING fts5(x)",
    "ALTER TABLE product RENAME TO x",
    "ANALYZE",
    "VACUUM",
    "VACUUM INTO '/tmp/x'",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT x",
    "ATTACH '/etc/passwd' AS x",
    "DETACH main",
    "PRAGMA table_info(product)",
    "PRAGMA journal_mode = WAL",
    "PRAGMA hard_heap_limit = 0",
    "SELECT * FROM pragma_database_list",
    "EXPLAIN DELETE FROM product",
    "SELECT load_extension('/tmp/x.so')",
    "SELECT readfile('/etc/passwd')",
    "SELECT fts3_tokenizer('a', x'00')",
    "SELECT randomblob(999999999)",
    "SELECT zeroblob(999999999)",
    "SELECT zeroblob(2147483647)",
    "SELECT nope(1)",
    "SELECT " + ", ".join("1" * 3000),
    "SELECT " + "(" * 5000,
    "SELECT " + "1+" * 5000 + "1",
    "SELECT '" + "x" * 200_000 + "'",
    " UNION ".join(["SELECT 1"] * 300),
    "SELECT " + "abs(" * 300 + "1" + ")" * 300,
    "SELECT max(" + ", ".join("1" * 200) + ")",
    "SELECT ?999999",
    "SELECT " + "NOT " * 3000 + "1",
    ENDLESS + "SELECT count(*) FROM n",
    ENDLESS + "SELECT zeroblob(999999) FROM n",
    ENDLESS + "SELECT i FROM n ORDER BY i",
    ENDLESS + "SELECT group_concat(i) FROM n",
    ENDLESS + "SELECT DISTINCT hex(zeroblob(9999)) || i FROM n ORDER BY 1",
    "SELECT json('" + "[" * 5000 + "')",
    "SELECT abs(-9223372036854775808)",
    "SELECT CAST(x'ff' AS TEXT)",
]
HARMLESS = [  # no statement, no value, no effect, or more rows than are shown
    "",
    " ",
    ";",
    "--",
    "/*",
    "SELECT ?",
    "SELECT :name",
    "REINDEX",
    "SELECT printf('%999999999d', 1)",
    ENDLESS + "SELECT * FROM n",
    "SELECT * FROM product a, product b, product c, product d, product e, product f, product g, "
    "product h ORDER BY 1, 2, 3",
]


def observed(env, query: str) -> str:
    """The observation after a query; the environment answers the next one."""
    outcome = step(env, f"<sql>{query}</sql>")
    (message,) = outcome.observation
    assert len(message["content"]) < 2100 and not outcome.done
    assert step(env, "<sql>SELECT 1</sql>").observation[0]["content"] == "1"
    return message["content"]


@pytest.mark.parametrize("query", ERRORS, ids=range(len(ERRORS)))
def test_d2_rejected_queries(query, folder):
    assert observed(make(folder), query).startswith("error: ")


@pytest.mark.parametrize("query", HARMLESS, ids=range(len(HARMLESS)))
def test_d2_harmless_queries(query, folder):
    assert not observed(make(folder), query).startswith("error: stopped")


@pytest.mark.parametrize(
    "solution",
    [
        "",
        "x",
        "\0",
        ENDLESS + "SELECT i FROM n",
        "DELETE FROM product",
        "SELECT NULL",
        "SELECT 1, 1",
        "SELECT x'31'",
        "SELECT '1'",
        "SELECT 1 WHERE 0",
    ],
)
def test_wrong_solutions(solution, folder):
    outcome = step(make(folder), f"<solution>{solution}</solution>")
    assert outcome.done and outcome.reward == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<sql>",
        "</sql>",
        "<sql></sql",
        "<solution>",
        "<sql><solution>",
        "\ud800",
        "\0",
        "<SQL>SELECT 1</SQL>",
        "</think><sql>",
        "x" * 100_000,
    ],
)
def test_turns_without_a_query(text, folder):
    outcome = step(make(folder), text)
    assert outcome.observation[0]["content"].startswith("error: ") and not outcome.done


DATABASES = {
    "none.sqlite": None,
    "folder.sqlite": "folder",
    "text.sqlite": b"no database " * 100,
    "zeros.sqlite": b"\0" * 8192,
    "cut.sqlite": "cut",
    "../shop_0.sqlite": None,
    "a\0b": None,
    "x" * 5000: None,
}


@pytest.mark.parametrize("name", DATABASES, ids=range(len(DATABASES)))
def test_databases(name, folder, tmp_path):
    content = DATABASES[name]
    if content == "folder":
        (tmp_path / name).mkdir()
    elif content == "cut":
        (tmp_path / name).write_bytes((folder / "shop_0.sqlite").read_bytes()[:5000])
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((EnvError, ValueError, OSError)) as error:
        asyncio.run(make(tmp_path, name).start())
    assert "\n" not in str(error.value)


def test_a_row_with_invalid_utf_8_is_an_error(folder, tmp_path):
    with sqlite3.connect(tmp_path / "odd.sqlite") as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (CAST(x'ff' AS TEXT))")
    connection.close()
    outcome = step(make(tmp_path, "odd.sqlite"), "<sql>SELECT x FROM t</sql>")
    assert outcome.observation[0]["content"].startswith("error: Could not decode to UTF-8")
