"""sql: answer a question by querying a SQLite database over several turns.

    <sql>SELECT ...</sql>               runs the query and returns its rows
    <solution>SELECT ...</solution>     ends the episode; reward 1 if its rows equal those of the
                                        reference query

Columns of the data set:

    question
    database   a SQLite file, relative to the option `databases`
    sql        the reference query; with ORDER BY, the order of rows counts

Queries run in worker processes (sql_pool) on a read-only connection, restricted to SELECT and a
list of functions: no writes, no pragmas, no other files. A query that exceeds `query_timeout_s` or
its memory is stopped, and the observation reports it. `python -m megastep.envs.sql_data FOLDER`
writes small databases and questions.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from megastep.envs.sql_pool import QueryError, ResultRows, run_query
from megastep.envs.tags import after_thinking, shortened, tagged
from megastep.errors import EnvError
from megastep.rollout.env import Env, Outcome, in_thread

INSTRUCTIONS = """\
Answer the question with SQL for SQLite. To look at the data, write a query as \
<sql>SELECT ...</sql>; you will see its rows. When you know the query that answers the question, \
write it as <solution>SELECT ...</solution>.

{schema}

Question: {question}"""
HINT = "error: write a query as <sql>...</sql>, or the final one as <solution>...</solution>"
COMPARED_ROWS = 100_000  # of a solution and of the reference query


class SQL(Env):
    columns = {"question": str, "database": str, "sql": str}

    def __init__(
        self,
        row: dict[str, Any],
        *,
        databases: str,
        query_timeout_s: float = 5.0,
        shown_rows: int = 20,
        shown_characters: int = 2000,
        observation_role: str = "user",
    ):
        self.question = row["question"]
        self.reference = row["sql"]
        self.database = Path(databases) / row["database"]
        self.timeout_s = query_timeout_s
        self.shown_rows = shown_rows
        self.shown_characters = shown_characters
        self.role = observation_role
        self.queries = 0
        self.query_errors = 0

    async def start(self):
        schema = await in_thread(self._schema)
        return [
            {"role": "user", "content": INSTRUCTIONS.format(schema=schema, question=self.question)}
        ]

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        turn = after_thinking(text)
        solution = tagged(turn, "solution")
        if solution is not None:
            is_right = await in_thread(self._is_right, solution)
            return Outcome(reward=float(is_right), done=True, metrics=self._metrics(is_right))
        query = tagged(turn, "sql")
        content = HINT if query is None else await in_thread(self._query, query)
        return Outcome([{"role": self.role, "content": content}], metrics=self._metrics(False))

    def _metrics(self, success: bool) -> dict[str, Any]:
        return {"success": success, "queries": self.queries, "query_errors": self.query_errors}

    def _schema(self) -> str:
        query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
        tables = run_query(self.database, query, self.timeout_s, 1000)
        return ";\n".join(" ".join(sql.split()) for (sql,) in tables)

    def _query(self, query: str) -> str:
        self.queries += 1
        try:
            rows = run_query(self.database, query, self.timeout_s, self.shown_rows + 1)
        except QueryError as error:
            self.query_errors += 1
            return f"error: {error}"
        lines = [
            " | ".join("NULL" if cell is None else str(cell) for cell in row)
            for row in rows[: self.shown_rows]
        ]
        if len(rows) > self.shown_rows:
            lines.append(f"... (only the first {self.shown_rows} rows are shown)")
        return shortened("\n".join(lines) or "(no rows)", self.shown_characters)

    def _is_right(self, solution: str) -> bool:
        try:
            expected = run_query(self.database, self.reference, self.timeout_s, COMPARED_ROWS)
        except QueryError as error:
            raise EnvError(f"the data set's own query fails: {error}: {self.reference}") from None
        try:
            found = run_query(self.database, solution, self.timeout_s, COMPARED_ROWS)
        except QueryError:
            return False
        is_ordered = re.search(r"\border\s+by\b", self.reference, re.IGNORECASE) is not None
        return same_rows(found, expected, is_ordered)


def same_rows(found: ResultRows, expected: ResultRows, ordered: bool) -> bool:
    found_rows = [_rounded(row) for row in found]
    expected_rows = [_rounded(row) for row in expected]
    if ordered:
        return found_rows == expected_rows
    return Counter(found_rows) == Counter(expected_rows)


def _rounded(row: tuple) -> tuple:
    return tuple(round(cell, 6) if isinstance(cell, float) else cell for cell in row)
