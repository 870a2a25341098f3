"""A BM25 retrieval server over a local corpus.

    python -m megastep.envs.retrieval CORPUS.jsonl [--host 127.0.0.1] [--port 8000] [--with-parent]

CORPUS.jsonl has a passage per line: {"contents": "text", ...}; other keys are returned with it.
Requests and responses:

    POST /retrieve   {"query": "text", "topk": 3} or {"queries": ["text", ...], "topk": 3}
    200              {"result": [[{"document": {"contents": "text", ...}, "score": 1.5}, ...], ...]}
                     with a list per query
    GET /health      200 {"passages": 120}

`--port 0` selects a free port; the server prints its address when it listens. `--with-parent` ends
the server with the process that started it.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import bm25s
from aiohttp import web

from megastep.distributed.processes import end_with_parent
from megastep.errors import CorpusError
from megastep.rollout.data import json_lines
from megastep.text import one_line

DEFAULT_PASSAGES = 3


class Corpus:
    def __init__(self, passages: list[dict]):
        self.passages = passages
        self.index = bm25s.BM25()
        self.index.index(_words([p["contents"] for p in passages]), show_progress=False)

    def search(self, queries: list[str], count: int) -> list[list[dict]]:
        count = min(count, len(self.passages))
        found, scores = self.index.retrieve(_words(queries), k=count, show_progress=False)
        return [self._results(*ranked) for ranked in zip(found.tolist(), scores.tolist())]

    def _results(self, found: list[int], scores: list[float]) -> list[dict]:
        ranked = zip(found, scores)
        return [{"document": self.passages[i], "score": float(s)} for i, s in ranked if s > 0]


def _words(texts: list[str]) -> list[list[str]]:
    return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def read_corpus(path: Path) -> Corpus:
    """Lines as in a data set, see `json_lines`."""
    passages = []
    try:
        for where, passage in json_lines(path):
            if isinstance(passage, str):
                raise CorpusError(f"{where}: {passage}")
            if not isinstance(passage.get("contents"), str):
                raise CorpusError(f'{where}: has no "contents"; {{"contents": "text"}} is needed')
            passages.append(passage)
    except CorpusError:
        raise
    except ValueError as error:
        raise CorpusError(str(error)) from None
    if not passages:
        raise CorpusError(f"{path}: has no passages")
    if not any(_words([p["contents"] for p in passages])):
        raise CorpusError(f"{path}: has no words to search for, only stop words such as `the`")
    return Corpus(passages)


class RequestError(ValueError):
    """An invalid request; status 400."""


async def _parse(request: web.Request) -> tuple[list[str], int]:
    """Queries, and the number of passages for each."""
    try:
        body = json.loads(await request.text())
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:
        # LookupError: an unknown charset
        raise RequestError(f"not readable as JSON ({one_line(error)})") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is a {type(body).__name__}")
    queries: Any = body["queries"] if "queries" in body else [body.get("query")]
    is_list = isinstance(queries, list) and len(queries) > 0
    if not is_list or not all(isinstance(query, str) for query in queries):
        raise RequestError("a query must be a text, queries a list of them")
    top_k = body.get("topk")
    if top_k is None:
        top_k = DEFAULT_PASSAGES
    if type(top_k) is not int or top_k < 1:
        raise RequestError("topk must be a whole number of 1 or more")
    return queries, top_k


def application(corpus: Corpus) -> web.Application:
    async def retrieve(request: web.Request) -> web.Response:
        try:
            queries, top_k = await _parse(request)
        except RequestError as error:
            problem = f'{{"query": "text", "topk": 3}} is needed: {error}'
            return web.json_response({"error": problem}, status=400)
        return web.json_response({"result": corpus.search(queries, top_k)})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"passages": len(corpus.passages)})

    app = web.Application()
    app.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    return app


async def listening(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Start the server; returns the runner, for cleanup, and the address for `env.options.url`."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner, f"http://{host}:{runner.addresses[0][1]}/retrieve"


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 to 65535")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megastep.envs.retrieval", description=__doc__.splitlines()[0]
    )
    parser.add_argument("corpus", type=Path, metavar="CORPUS.jsonl")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, default=8000, help="0: a free port")
    parser.add_argument(
        "--with-parent", action="store_true", help="end when the starting process ends"
    )
    args = parser.parse_args(argv)
    if args.with_parent:
        end_with_parent()

    async def serve():
        runner, url = await listening(application(corpus), args.host, args.port)
        print(f"{len(corpus.passages)} passages at {url}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    try:
        corpus = read_corpus(args.corpus)
        asyncio.run(serve())
    except CorpusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        print(f"error: --host {args.host!r} --port {args.port}: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
