"""S17: retrieval over a local corpus, through the real HTTP server."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from megastep.envs import search_data
from megastep.envs.retrieval import application, listening, read_corpus
from megastep.envs.search import Search, plain
from megastep.errors import CorpusError, EnvError
from megastep.rollout.data import read_rows

NO_IDS = np.array([], np.int32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    search_data.write(folder, people=30, questions=80, seed=0)
    return folder


def with_server(data, body):
    """Run `body(url)` against a server of the corpus."""

    async def run():
        app = application(read_corpus(data / "corpus.jsonl"))
        runner, url = await listening(app, "127.0.0.1", 0)
        try:
            return await body(url)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_s17_two_searches_answer_a_question(data):
    rows = read_rows(str(data / "train.jsonl"), Search, 0, 0)
    row = next(r for r in rows if r["question"].startswith("On which river"))
    person = row["question"].split()[-3]

    async def body(url):
        env = Search(row, url=url, passages=1)
        (first,) = await env.start()
        assert row["question"] in first["content"]
        born = await env.step(f"<think>who?</think><search>{person} born city</search>", NO_IDS)
        city = born.observation[0]["content"].split("city of ")[1].split(".")[0]
        lies = await env.step(f"<search>the city {city} is on which river</search>", NO_IDS)
        river = lies.observation[0]["content"].split("river ")[1].split(".")[0]
        return born, await env.step(f"<answer>The {river.lower()}.</answer>", NO_IDS)

    born, answered = with_server(data, body)
    assert born.observation[0]["content"].startswith("<information>\n[1] ") and not born.done
    assert (
        answered.done
        and answered.reward == 1
        and answered.metrics == {"success": True, "searches": 2}
    )


def test_wrong_and_malformed_turns(data):
    async def body(url):
        env = Search({"question": "?", "answers": ["x"]}, url=url)
        turns = ("hm", "<search> </search>", "<search>qqq</search>", "<answer>y</answer>")
        return [await env.step(text, NO_IDS) for text in turns]

    hint, empty, nothing, wrong = with_server(data, body)
    assert (
        hint.observation[0]["content"].startswith("error: write <search>")
        and hint.observation == empty.observation
    )
    assert nothing.observation[0]["content"] == "<information>\nnothing found\n</information>"
    assert wrong.done and wrong.reward == 0


def test_the_server_accepts_query_and_queries(data):
    async def body(url):
        async with aiohttp.ClientSession() as session:

            async def ask(request):
                async with session.post(url, json=request) as response:
                    return response.status, await response.json()

            one = await ask({"query": "river city", "topk": 2, "return_scores": True})
            several = await ask({"queries": ["river city", "born"], "topk": 2})
            bad = [
                await ask(r)
                for r in ({}, [], {"query": 3}, {"query": "x", "topk": "many"}, {"queries": []})
            ]
            async with session.get(url.replace("retrieve", "health")) as response:
                return one, several, bad, await response.json()

    one, several, bad, health = with_server(data, body)
    assert one[0] == 200 and len(one[1]["result"]) == 1 and len(one[1]["result"][0]) == 2
    assert (
        set(one[1]["result"][0][0]) == {"document", "score"}
        and "contents" in one[1]["result"][0][0]["document"]
    )
    assert len(several[1]["result"]) == 2 and several[1]["result"][0] == one[1]["result"][0]
    assert all(status == 400 and "is needed" in answer["error"] for status, answer in bad)
    assert health == {"passages": 42}


def test_no_server_and_an_invalid_response(data):
    row = {"question": "?", "answers": ["x"]}

    async def ask(url):
        with pytest.raises(EnvError) as error:
            await Search(row, url=url, retries=0).step("<search>x</search>", NO_IDS)
        return str(error.value)

    assert "is it running?" in asyncio.run(ask("http://127.0.0.1:9/retrieve"))

    async def run():
        async def answer(request):
            return web.json_response({"docs": []})

        app = web.Application()
        app.router.add_post("/retrieve", answer)
        runner, url = await listening(app, "127.0.0.1", 0)
        try:
            return await ask(url)
        finally:
            await runner.cleanup()

    assert "invalid response (KeyError: 'result')" in asyncio.run(run())


def test_one_command_starts_the_server(data):
    command = [
        sys.executable,
        "-m",
        "megastep.envs.retrieval",
        str(data / "corpus.jsonl"),
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("42 passages at http://127.0.0.1:")
        url = line.split()[-1]
        env = Search({"question": "?", "answers": ["x"]}, url=url)
        outcome = asyncio.run(env.step("<search>city</search>", NO_IDS))
        assert "[1] " in outcome.observation[0]["content"]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no passages"),
        ('{"contents": "a"}\n{"text": "b"}\n', ':2: has no "contents"'),
        ("{", ":1: not readable as JSON"),
    ],
)
def test_invalid_corpora(content, message, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(CorpusError, match=message):
        read_corpus(path)


def test_answers_are_compared_without_case_punctuation_and_articles():
    assert plain(" The  Big-Apple!") == plain("bigapple") and plain("a cat") != plain("a dog")


def test_answers_to_the_generated_questions_are_in_the_corpus(data):
    passages = " ".join(
        json.loads(line)["contents"] for line in (data / "corpus.jsonl").read_text().splitlines()
    )
    asked = {
        split: read_rows(str(data / f"{split}.jsonl"), Search, 0, 0) for split in ("train", "eval")
    }
    for rows in asked.values():
        assert rows and all(f" {r['answers'][0]}." in passages for r in rows)
    assert not {r["question"] for r in asked["train"]} & {r["question"] for r in asked["eval"]}


@pytest.mark.parametrize(
    ("module", "given", "problem"),
    [
        ("sql_data", ["--questions", "7"], "--questions 7: must be one per database"),
        ("sql_data", ["--demonstrations", "0"], "--demonstrations 0: must be 1 or more"),
        ("search_data", ["--people", "1"], "--people 1: must be 8 or more"),
        ("search_data", ["--questions", "0"], "--questions 0: must be 64 or more"),
        ("search_data", ["--demonstrations", "0"], "--demonstrations 0: must be 1 or more"),
    ],
)
def test_data_without_rows_is_an_error(tmp_path, module, given, problem):
    command = [sys.executable, "-m", f"megastep.envs.{module}", tmp_path / "data", *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and problem in ended.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_s17_demonstrations_search_as_often_as_their_question_needs(data, tmp_path):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    search_data.write_demonstrations(tmp_path, 20, seed=0)
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    conversations = [json.loads(line)["messages"] for line in lines]
    searches = {"In which city": 1, "On which river": 2}
    seen = set()
    for messages in conversations:
        question = messages[0]["content"].rpartition("Question: ")[2]
        kind = next(start for start in searches if question.startswith(start))
        seen.add(kind)
        turns = [m["content"] for m in messages if m["role"] == "assistant"]
        assert len(turns) == searches[kind] + 1 and turns[-1].startswith("<answer>")
        answer = turns[-1].removeprefix("<answer>").removesuffix("</answer>")
        # The last passages contain the answer: it can be learned from them.
        assert answer in messages[-2]["content"]
    assert len(conversations) == 20 and seen == set(searches)
