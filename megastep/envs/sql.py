"""sql: answer a question by querying a real SQLite database, over several turns.

    <sql>SELECT ...</sql>               runs the query and shows its rows
    <solution>SELECT ...</solution>     ends the episode; reward 1 if its rows are those of the row's own query

Columns of the data set:

    question   what is asked
    database   a SQLite file, relative to the option `databases`
    sql        a query with the right answer; with ORDER BY, the order of rows counts

Queries run in processes of their own (sql_pool), on a read-only connection that may select and nothing else: no writes,
no pragmas, no other files, functions of a list. One that takes longer than `query_timeout_s`, or too much memory, is
stopped, and the model is told. `python -m megastep.envs.sql_data FOLDER` writes small databases and questions to begin
with.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from megastep.envs.sql_pool import QueryError, Rows, run_query
from megastep.envs.tags import after_thinking, shortened, tagged
from megastep.errors import EnvError
from megastep.rollout.env import Env, Outcome, in_thread

INSTRUCTIONS = """\
Answer the question with SQL for SQLite. To look at the data, write a query as <sql>SELECT ...</sql>; you will see its \
rows. When you know the query that answers the question, write it as <solution>SELECT ...</solution>.

{schema}

Question: {question}"""
HINT = "error: write a query as <sql>...</sql>, or the final one as <solution>...</solution>"
COMPARED_ROWS = 100_000  # a result with more than these is no answer


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
        self.question, self.gold = row["question"], row["sql"]
        self.database = Path(databases) / row["database"]
        self.timeout_s, self.shown_rows, self.shown_characters = (
            query_timeout_s,
            shown_rows,
            shown_characters,
        )
        self.role = observation_role
        self.queries = self.failures = 0

    async def start(self):
        schema = await in_thread(self._schema)
        return [
            {"role": "user", "content": INSTRUCTIONS.format(schema=schema, question=self.question)}
        ]

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        said = after_thinking(text)
        solution, query = tagged(said, "solution"), tagged(said, "sql")
        if solution is not None:
            right = await in_thread(self._is_right, solution)
            return Outcome(reward=float(right), done=True, metrics=self._metrics(right))
        shown = HINT if query is None else await in_thread(self._show, query)
        return Outcome([{"role": self.role, "content": shown}], metrics=self._metrics(False))

    def _metrics(self, success: bool) -> dict[str, Any]:
        return {"success": success, "queries": self.queries, "query_errors": self.failures}

    def _schema(self) -> str:
        # The schema table is no secret, and the only thing read beside the model's own queries.
        tables = run_query(
            self.database,
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL",
            self.timeout_s,
            1000,
        )
        return ";\n".join(" ".join(sql.split()) for (sql,) in tables)

    def _show(self, query: str) -> str:
        self.queries += 1
        try:
            rows = run_query(self.database, query, self.timeout_s, self.shown_rows + 1)
        except QueryError as error:
            self.failures += 1
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
            expected = run_query(self.database, self.gold, self.timeout_s, COMPARED_ROWS)
        except QueryError as error:
            raise EnvError(f"the data set's own query fails: {error}: {self.gold}") from None
        try:
            found = run_query(self.database, solution, self.timeout_s, COMPARED_ROWS)
        except QueryError:
            return False
        return same_rows(
            found,
            expected,
            ordered=re.search(r"\border\s+by\b", self.gold, re.IGNORECASE) is not None,
        )


def same_rows(found: Rows, expected: Rows, ordered: bool) -> bool:
    found, expected = [_rounded(row) for row in found], [_rounded(row) for row in expected]
    return found == expected if ordered else Counter(found) == Counter(expected)


def _rounded(row: tuple) -> tuple:
    return tuple(round(cell, 6) if isinstance(cell, float) else cell for cell in row)
