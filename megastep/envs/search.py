"""search: answer a question with the help of a retrieval server.

    <search>query</search>     shows the passages found
    <answer>text</answer>      ends the episode; reward 1 if it is one of the right answers, by its words

Columns of the data set: `question`, and `answers`, a list of texts any of which is right.

The server speaks HTTP. What is sent and what comes back is what the retrieval servers of Search-R1 (faiss, e5) and
SkyRL speak too, so that the one can take the other's place:

    POST URL   {"query": "text", "topk": 3, "return_scores": true}
    200        {"result": [[{"document": {"contents": "text"}, "score": 1.5}, ...]]}

`python -m megastep.envs.retrieval CORPUS.jsonl` starts one on BM25; `python -m megastep.envs.search_data FOLDER`
writes a small corpus and questions to begin with.
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
Answer the question. To look something up, write <search>what to look for</search>; you will see what was found. When \
you know the answer, write it as <answer>...</answer>, in as few words as possible.

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
        self.question, self.answers = row["question"], row["answers"]
        self.url, self.passages, self.retries = url, passages, retries
        self.timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self.shown_characters, self.role = shown_characters, observation_role
        self.searches = 0

    async def start(self):
        return [{"role": "user", "content": INSTRUCTIONS.format(question=self.question)}]

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        said = after_thinking(text)
        answer, query = tagged(said, "answer"), tagged(said, "search")
        if answer is not None:
            right = plain(answer) in {plain(a) for a in self.answers}
            return Outcome(
                reward=float(right),
                done=True,
                metrics={"success": right, "searches": self.searches},
            )
        shown = HINT if not query else await self._show(query)
        return Outcome(
            [{"role": self.role, "content": shown}],
            metrics={"success": False, "searches": self.searches},
        )

    async def _show(self, query: str) -> str:
        self.searches += 1
        found = [f"[{i}] {passage}" for i, passage in enumerate(await self._retrieve(query), 1)]
        shown = shortened("\n".join(found) or "nothing found", self.shown_characters)
        return f"<information>\n{shown}\n</information>"

    async def _retrieve(self, query: str) -> list[str]:
        request = {"query": query, "topk": self.passages, "return_scores": True}
        for attempt in range(self.retries + 1):
            try:
                async with aiohttp.ClientSession(timeout=self.timeout) as session:
                    async with session.post(self.url, json=request) as response:
                        response.raise_for_status()
                        found = (await response.json())["result"]
                        return [passage["document"]["contents"] for passage in found[0]]
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__} {error}"
                await asyncio.sleep(0.2 * 2**attempt)
            except (KeyError, IndexError, TypeError) as error:
                raise EnvError(
                    f"{self.url}: answered in another form ({type(error).__name__}: {error})"
                ) from None
        raise EnvError(
            f"{self.url}: no answer from the retrieval server ({problem.strip()}); is it running?"
        )


def plain(text: str) -> str:
    """Words only: no case, punctuation or articles."""
    words = text.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if not re.fullmatch("a|an|the", word))
