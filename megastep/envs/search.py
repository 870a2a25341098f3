"""search: answer a question with a retrieval server.

    <search>query</search>     returns passages
    <answer>text</answer>      ends the episode; reward 1 for one of the right answers, compared
                               without case, punctuation and articles

Columns of the data set: `question`, and `answers`, a list of right answers.

The HTTP protocol is that of the retrieval servers of Search-R1 (faiss, e5) and SkyRL, so that these
work as well:

    POST URL   {"query": "text", "topk": 3, "return_scores": true}
    200        {"result": [[{"document": {"contents": "text"}, "score": 1.5}, ...]]}

`python -m megastep.envs.retrieval CORPUS.jsonl` starts a BM25 server;
`python -m megastep.envs.search_data FOLDER` writes a small corpus and questions.
"""

import asyncio
import re
import string
from typing import Any

import aiohttp
import numpy as np

from megastep.envs.tags import after_thinking, shortened, tagged
from megastep.errors import EnvError
from megastep.rollout.env import Env, Outcome

INSTRUCTIONS = """\
Answer the question. To look something up, write <search>what to look for</search>; you will see \
what was found. When you know the answer, write it as <answer>...</answer>, in as few words as \
possible.

Question: {question}"""
HINT = "error: write <search>...</search>, or the final answer as <answer>...</answer>"


class Search(Env):
    columns = {"question": str, "answers": list}

    def __init__(
        self,
        row: dict[str, Any],
        *,
        url: str = "http://127.0.0.1:8000/retrieve",
        passages: int = 3,
        request_timeout_s: float = 10.0,
        retries: int = 2,
        shown_characters: int = 2000,
        observation_role: str = "user",
    ):
        self.question = row["question"]
        self.answers = row["answers"]
        self.url = url
        self.passages = passages
        self.retries = retries
        self.timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self.shown_characters = shown_characters
        self.role = observation_role
        self.searches = 0

    async def start(self):
        return [{"role": "user", "content": INSTRUCTIONS.format(question=self.question)}]

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        turn = after_thinking(text)
        answer = tagged(turn, "answer")
        if answer is not None:
            is_right = plain(answer) in {plain(right) for right in self.answers}
            return Outcome(reward=float(is_right), done=True, metrics=self._metrics(is_right))
        query = tagged(turn, "search")
        content = await self._search(query) if query else HINT
        return Outcome([{"role": self.role, "content": content}], metrics=self._metrics(False))

    def _metrics(self, success: bool) -> dict[str, Any]:
        return {"success": success, "searches": self.searches}

    async def _search(self, query: str) -> str:
        self.searches += 1
        passages = await self._retrieve(query)
        lines = [f"[{number}] {passage}" for number, passage in enumerate(passages, 1)]
        content = shortened("\n".join(lines) or "nothing found", self.shown_characters)
        return f"<information>\n{content}\n</information>"

    async def _retrieve(self, query: str) -> list[str]:
        request = {"query": query, "topk": self.passages, "return_scores": True}
        for attempt in range(self.retries + 1):
            try:
                async with aiohttp.ClientSession(timeout=self.timeout) as session:
                    async with session.post(self.url, json=request) as response:
                        response.raise_for_status()
                        result = (await response.json())["result"]
                        return [passage["document"]["contents"] for passage in result[0]]
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__} {error}"
                await asyncio.sleep(0.2 * 2**attempt)
            except (KeyError, IndexError, TypeError) as error:
                raise EnvError(
                    f"{self.url}: invalid response ({type(error).__name__}: {error})"
                ) from None
        raise EnvError(
            f"{self.url}: no answer from the retrieval server ({problem.strip()}); is it running?"
        )


def plain(text: str) -> str:
    """Words without case, punctuation and articles."""
    words = text.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if not re.fullmatch("a|an|the", word))
