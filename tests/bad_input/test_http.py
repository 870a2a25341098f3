"""The retrieval server: invalid requests get status 400, invalid corpora and arguments exit with
code 2."""

import asyncio
import contextlib
import io
import json
import socket

import aiohttp
import pytest

from megastep.envs import retrieval
from megastep.envs.retrieval import Corpus, application, listening, read_corpus
from megastep.errors import CorpusError

from .harness import check_lines, time_limit

CORPUS = Corpus(
    [
        {"contents": "Paris lies on the Seine"},
        {"contents": "Rome lies on the Tiber"},
        {"contents": "the"},
    ]
)
JSON = {"Content-Type": "application/json"}


def send(body: bytes, headers: dict | None = None, method: str = "POST", path: str = "/retrieve"):
    """Status and text of the response."""

    async def run():
        runner, url = await listening(application(CORPUS), "127.0.0.1", 0)
        address = url.replace("/retrieve", path)
        try:
            async with aiohttp.ClientSession(headers=JSON | (headers or {})) as session:
                async with session.request(method, address, data=body) as response:
                    return response.status, await response.text()
        finally:
            await runner.cleanup()

    with time_limit(20):
        return asyncio.run(run())


BODIES = [
    b"",
    b" ",
    b"text",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b"true",
    b"NaN",
    b"{}",
    b'{"query": }',
    b"\xff\xfe",
    b"\0",
    b"[" * 100_000,
    b'{"query":' * 50_000,
    b'{"a": 1}',
    b'{"query": null}',
    b'{"query": 5}',
    b'{"query": ["x"]}',
    b'{"query": {"x": 1}}',
    b'{"queries": []}',
    b'{"queries": null}',
    b'{"queries": "x"}',
    b'{"queries": [1]}',
    b'{"queries": [null]}',
    b'{"queries": ["x", 1]}',
    b'{"queries": {"a": "b"}}',
    b'{"queries": [["x"]]}',
    *[
        b'{"query": "Paris", "topk": %s}' % topk
        for topk in (
            b"Infinity",
            b"-Infinity",
            b"NaN",
            b"0",
            b"-1",
            b"-99999999999999999999",
            b"1.5",
            b"1e400",
            b'"3"',
            b'"many"',
            b"[]",
            b"[3]",
            b"{}",
            b"true",
            b"false",
            b"1" + b"0" * 5000,
        )
    ],
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_c16_invalid_requests(body):
    status, answer = send(body)
    assert status == 400 and "is needed" in json.loads(answer)["error"] and len(answer) < 700


@pytest.mark.parametrize(
    "charset", ["nonsense", "x" * 500, "hex", "base64", "utf-16", "undefined", "rot13"]
)
def test_c16_charsets(charset):
    headers = {"Content-Type": f"application/json; charset={charset}"}
    status, _ = send(b'{"query": "Paris"}', headers)
    assert status == 400


@pytest.mark.parametrize(
    "body, headers, method, path, expected",
    [
        (b"x" * (2 << 20), {}, "POST", "/retrieve", 413),
        (b"", {}, "GET", "/retrieve", 405),
        (b"{}", {}, "PUT", "/retrieve", 405),
        (b"{}", {}, "POST", "/", 404),
        (b"{}", {}, "POST", "/health", 405),
        (b"{}", {}, "POST", "/../etc/passwd", 404),
        (b"no gzip", {"Content-Encoding": "gzip"}, "POST", "/retrieve", 400),
    ],
)
def test_c16_other_requests(body, headers, method, path, expected):
    assert send(body, headers, method, path)[0] == expected


@pytest.mark.parametrize(
    "request_, found",
    [
        ({"query": "Paris"}, 1),
        ({"query": "lies", "topk": 1}, 1),
        ({"query": "lies", "topk": 10**30}, 2),
        ({"query": ""}, 0),
        ({"query": "the"}, 0),
        ({"query": "\ud800"}, 0),
        ({"query": "\0"}, 0),
        ({"query": "x" * 100_000}, 0),
        ({"query": "Paris", "topk": None}, 1),
        ({"query": "Paris", "more": [1]}, 1),
        ({"queries": ["Seine", "the"]}, 1),
    ],
)
def test_valid_requests(request_, found):
    status, answer = send(json.dumps(request_).encode())
    assert status == 200 and len(json.loads(answer)["result"][0]) == found


# ---------------------------------------------------------------- corpora

GOOD = b'{"contents": "Paris lies on the Seine"}\n'
CORPORA = {
    "empty": (b"", "has no passages"),
    "blank": (b"\n \n", "has no passages"),
    "text": (GOOD + b"x\n", ":2: not readable as JSON"),
    "half": (b"{", ":1: not readable as JSON"),
    "latin": (b'{"contents": "\xe9"}', ":1: not readable as JSON"),
    "deep": (b"[" * 100_000, ":1: not readable as JSON"),
    "list": (b"[]", ":1: holds a list"),
    "string": (b'"contents"', ":1: holds a str"),
    "other_key": (GOOD + b"\n" + b'{"text": "b"}', ':3: has no "contents"'),
    "number": (b'{"contents": 5}', ':1: has no "contents"'),
    "none": (b'{"contents": null}', ':1: has no "contents"'),
    "surrogate": (b'{"contents": "\\ud800"}', "lone surrogate"),
    "stop_words": (
        b'{"contents": "the and of"}\n{"contents": "a"}\n',
        "has no words to search for",
    ),
    "no_words": (b'{"contents": ""}\n{"contents": "! ?"}\n', "has no words to search for"),
    "binary": (b"\0\1\2\n", ":1: not readable as JSON"),
}


@pytest.mark.parametrize("name", CORPORA)
def test_c16_corpora(name, tmp_path):
    content, message = CORPORA[name]
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(CorpusError) as error:
        read_corpus(path)
    assert message in str(error.value) and str(path) in str(error.value)
    check_lines([f"error: {error.value}"])


@pytest.mark.parametrize(
    "content, passages",
    [
        (b"\xef\xbb\xbf" + GOOD, 1),
        (b"\n" + GOOD + b"\n\n" + GOOD, 2),
        (GOOD.replace(b"\n", b"\r\n") * 2, 2),
        (b'{"contents": "Paris\xe2\x80\xa8lies\xe2\x80\xa9on\xc2\x85it"}\n', 1),
        (GOOD + b'{"contents": "the"}\n', 2),
    ],
)
def test_c16_valid_corpora(content, passages, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    corpus = read_corpus(path)
    assert len(corpus.passages) == passages and len(corpus.search(["paris"], 9)[0]) >= 1


# ---------------------------------------------------------------- arguments


def run_main(*argv) -> tuple[int, list[str]]:
    """The exit code and the lines of stderr."""
    err = io.StringIO()
    with time_limit(20), contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = retrieval.main([str(argument) for argument in argv])
        except SystemExit as exit:
            code = exit.code
    return code, err.getvalue().splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--port", "99999"),
        ("--port", "65536"),
        ("--port", "-1"),
        ("--port", "1.5"),
        ("--port", "http"),
        ("--port", ""),
        ("--port", "٣" * 9),
        ("--port", "9" * 5000),
        ("--host", "no.such.host.invalid"),
        ("--host", "a..b"),
        ("--host", "x" * 300),
        ("--host", "256.1.1.1"),
        ("--host", "\0"),
        ("--nonsense",),
        ("more",),
        ("--port",),
    ],
)
def test_c16_arguments(arguments, tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(GOOD)
    code, lines = run_main(tmp_path / "corpus.jsonl", *arguments)
    assert code == 2 and not any("Traceback" in line for line in lines)
    assert "error: " in lines[-1]


@pytest.mark.parametrize("path", ["none.jsonl", ".", "a\0b", "x" * 5000, ""])
def test_c16_files(path):
    code, lines = run_main(path, "--port", "0")
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ")


def test_a_port_in_use(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(GOOD)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines = run_main(tmp_path / "corpus.jsonl", "--port", port)
    assert code == 2 and len(lines) == 1 and str(port) in lines[0]
