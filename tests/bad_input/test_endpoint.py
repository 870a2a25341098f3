"""Hostile requests to the endpoint of agent programs: a clear status, and no other episode is
disturbed."""

import asyncio
import contextlib
import json

import aiohttp
import pytest

from megastep.rollout import endpoint as endpoint_module
from megastep.rollout.endpoint import Endpoint
from megastep.rollout.generation import Session
from megastep.rollout.recording import Recording
from tests.rollout.agents import make_pool, user
from tests.rollout.test_endpoint import TWO_TOKENS

CHAT, TEXT, MESSAGES = "chat/completions", "completions", "messages"
RESPONSES = "responses"
ONE = {"messages": [user("?")]}
PROMPT = {"prompt": "ab"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(**more):
    return CHAT, ONE | more


def one_message(**message):
    return CHAT, {"messages": [message]}


# path, body (text, bytes or JSON), status, part of the message
BAD = {
    "not_json": (CHAT, "{", 400, "not readable as JSON"),
    "empty": (CHAT, "", 400, "not readable as JSON"),
    "a_list": (CHAT, [], 400, "a JSON object is needed"),
    "not_utf8": (CHAT, b"\xff\xfe\x00{", 400, "not readable as JSON"),
    "nan": (CHAT, '{"messages": [], "temperature": NaN}', 400, "NaN is no JSON number"),
    "deep": (CHAT, "[" * 100_000, 400, "not readable as JSON"),
    "huge": (CHAT, b" " * (3 << 20), 413, "too large"),
    "no_messages": (CHAT, {}, 400, "messages: a list"),
    "empty_messages": (CHAT, {"messages": []}, 400, "messages: a list"),
    "messages_text": (CHAT, {"messages": "hello"}, 400, "messages: a list"),
    "message_text": (CHAT, {"messages": ["hello"]}, 400, "messages[0] is 'hello'"),
    "100k_messages": (CHAT, {"messages": [user("")] * 100_000}, 413, "too large"),
    "5k_messages": (CHAT, {"messages": [user("")] * 5000}, 400, "at most 4096"),
    "no_role": (*one_message(content="?"), 400, "messages[0].role is None"),
    "wrong_role": (*one_message(role="king", content="?"), 400, "role is 'king'"),
    "no_content": (*one_message(role="user"), 400, "messages[0].content is missing"),
    "content_number": (*one_message(role="user", content=3), 400, "messages[0].content is 3"),
    "content_null_part": (*one_message(role="user", content=[None]), 400, "type None"),
    "image": (
        *one_message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        400,
        "type 'image_url'; the model reads text",
    ),
    "surrogate": (CHAT, '{"messages":[{"role":"user","content":"\\ud800"}]}', 400, "surrogate"),
    "calls_text": (*one_message(role="assistant", tool_calls="f()"), 400, "tool_calls is 'f()'"),
    "calls_nameless": (*one_message(role="assistant", tool_calls=[{}]), 400, "with a name"),
    "call_id": (*one_message(role="tool", content="", tool_call_id=3), 400, "tool_call_id is 3"),
    "tools_object": (*chat(tools={}), 400, "tools is {}; a list is needed"),
    "tool_nameless": (*chat(tools=[{"type": "function"}]), 400, "tools[0] is"),
    "tool_choice": (*chat(tools=[TOOL], tool_choice="g"), 400, "tool_choice is 'g'"),
    "two_required": (*chat(tools=[TOOL] * 2, tool_choice="required"), 400, "name the one"),
    "no_tool_format": (*chat(tools=[TOOL], tool_choice="required"), 400, "write tool calls"),
    "temperature": (*chat(temperature=-1), 400, "temperature is -1"),
    "temperature_text": (*chat(temperature="hot"), 400, "temperature is 'hot'"),
    "temperature_inf": (CHAT, '{"messages":[],"temperature":1e999}', 400, "temperature is inf"),
    "top_p": (*chat(top_p=2), 400, "top_p is 2"),
    "top_k": (*chat(top_k=1.5), 400, "top_k is 1.5"),
    "max_tokens": (*chat(max_tokens=0), 400, "max_tokens is 0"),
    "max_tokens_bool": (*chat(max_tokens=True), 400, "max_tokens is True"),
    "n": (*chat(n=1000), 400, "n is 1000"),
    "n_over_limit": (*chat(n=30), 429, "rollout.max_turns = 20"),
    "seed": (*chat(seed=2**80), 400, "seed is"),
    "stop": (*chat(stop=[""]), 400, "stop is ['']"),
    "many_stops": (*chat(stop=["a"] * 99), 400, "up to 16 texts"),
    "stream": (*chat(stream="yes"), 400, "stream is 'yes'"),
    "model": (*chat(model=3), 400, "model is 3"),
    "logit_bias": (*chat(logit_bias=[1]), 400, "logit_bias is [1]"),
    "logit_bias_id": (*chat(logit_bias={"999999": 1}), 400, "logit_bias has the token id 999999"),
    "top_logprobs": (*chat(logprobs=True, top_logprobs=5), 400, "top_logprobs"),
    "grammar": (*chat(response_format={"type": "json_object"}), 400, "response_format"),
    "too_long": (*one_message(role="user", content="x" * 9000), 400, "context length exceeded"),
    "no_prompt": (TEXT, {}, 400, "prompt is None"),
    "empty_prompt": (TEXT, {"prompt": ""}, 400, "prompt is empty"),
    "prompt_ids": (TEXT, {"prompt": [1, 999_999]}, 400, "prompt has the token id 999999"),
    "negative_id": (TEXT, {"prompt": [-1]}, 400, "prompt is [-1]"),
    "bool_id": (TEXT, {"prompt": [True]}, 400, "prompt is [True]"),
    "two_prompts": (TEXT, {"prompt": ["a", "b"]}, 400, "one text or one list"),
    "echo": (TEXT, PROMPT | {"echo": True}, 400, "echo"),
    "system_number": (MESSAGES, ONE | {"system": 3}, 400, "system is 3"),
    "system_role": (MESSAGES, {"messages": [{"role": "system"}]}, 400, "user or assistant"),
    "block": (MESSAGES, {"messages": [user([{"type": "image"}])]}, 400, "type 'image'"),
    "blocks": (MESSAGES, {"messages": [user([3])]}, 400, "text or blocks are needed"),
    "schema": (MESSAGES, ONE | {"tools": [{"name": "f"}]}, 400, "input_schema"),
    "choice": (MESSAGES, ONE | {"tool_choice": "any"}, 400, "auto, any, tool or none"),
    "no_input": (RESPONSES, {}, 400, "input is None"),
    "input_number": (RESPONSES, {"input": [3]}, 400, "input[0] is 3"),
    "input_call": (RESPONSES, {"input": [{"type": "function_call"}]}, 400, "needs a name"),
    "web_search": (RESPONSES, {"input": "?", "tools": [{"type": "web"}]}, 400, "functions"),
    "stored": (RESPONSES, {"input": "?", "previous_response_id": "x"}, 400, "not stored"),
    "schema_text": (
        RESPONSES,
        {"input": "?", "text": {"format": {"type": "json_schema"}}},
        400,
        "text.format",
    ),
    "no_such_path": ("embeddings", ONE, 404, "Not Found"),
}


class Scene:
    """Two episodes at one endpoint; `mine` is attacked, `other` must not notice."""

    async def __aenter__(self):
        pool, self.script, _ = make_pool(None)
        self.recordings = [Recording(pool.model, 0, i, Session("0", i)) for i in range(2)]
        self.endpoint = Endpoint(max_body_mb=2)
        self.open = contextlib.AsyncExitStack()
        self.client = await self.open.enter_async_context(aiohttp.ClientSession())
        self.mine, self.other = [
            await self.open.enter_async_context(self.endpoint.session(recording))
            for recording in self.recordings
        ]
        return self

    async def __aexit__(self, *error):
        await self.open.aclose()

    async def post(self, llm, path, body, key=None):
        headers = {"Authorization": f"Bearer {llm.api_key if key is None else key}"}
        data = body if isinstance(body, (str, bytes)) else json.dumps(body)
        url = f"{llm.base_url}/{path}"
        async with self.client.post(url, data=data, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def check_both_work(self):
        for llm, recording in zip((self.mine, self.other), self.recordings):
            before = len(recording.calls)
            status, body, _ = await self.post(llm, CHAT, ONE)
            assert status == 200 and body["choices"][0]["message"]["content"] == "ab"
            assert len(recording.calls) == before + 1


def run(scene):
    async def whole():
        async with Scene() as opened:
            await scene(opened)
            await opened.check_both_work()

    asyncio.run(whole())


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_has_a_clear_status(name):
    path, sent, status, message = BAD[name]

    async def attack(scene):
        found, body, headers = await scene.post(scene.mine, path, sent)
        assert found == status, body
        assert message in body["error"]["message"]
        assert headers["x-should-retry"] == "false"
        assert ("type" in body) == (path == MESSAGES)  # the form of Anthropic's errors
        assert [len(recording.calls) for recording in scene.recordings] == [0, 0]
        assert not scene.script.calls

    run(attack)


def test_keys_open_their_own_episode_only():
    async def attack(scene):
        for key in ("", "wrong", scene.other.api_key, scene.mine.api_key + "x", "\xfc"):
            for path, sent in ((CHAT, ONE), (TEXT, PROMPT), (MESSAGES, ONE)):
                status, body, _ = await scene.post(scene.mine, path, sent, key)
                assert status == 401 and body["error"]["message"] == "wrong or expired key"
        root, _, _ = scene.mine.base_url.rpartition("/v1")
        async with scene.client.get(f"{root}x/v1/models") as response:
            assert response.status == 401
        assert not scene.script.calls
        pool, _, _ = make_pool(None)
        recording = Recording(pool.model, 1, 0, Session("1", 0))
        async with scene.endpoint.session(recording) as ended:
            assert (await scene.post(ended, CHAT, ONE))[0] == 200
        assert (await scene.post(ended, CHAT, ONE))[0] == 401
        assert len(recording.calls) == 1
        paths = {llm.base_url for llm in (scene.mine, scene.other, ended)}
        keys = {llm.api_key for llm in (scene.mine, scene.other, ended)}
        assert len(paths) == len(keys) == 3 and all(len(key) >= 32 for key in keys)

    run(attack)


class Waiting:
    """An engine that waits for `release`."""

    def __init__(self, engine):
        self.engine = engine
        self.begun = asyncio.Event()
        self.release = asyncio.Event()
        self.aborted = 0

    async def __call__(self, *arguments, **named):
        self.begun.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return await self.engine(*arguments, **named)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_call(stream):
    async def attack(scene):
        recording = scene.recordings[0]
        whole = recording.model
        engine = Waiting(scene.script)
        recording.model = make_pool(None, generate=engine)[0].model
        sent = asyncio.create_task(scene.post(scene.mine, CHAT, ONE | {"stream": stream}))
        await engine.begun.wait()
        sent.cancel()
        await asyncio.wait([sent])
        async with asyncio.timeout(5):
            while not engine.aborted:
                await asyncio.sleep(0.01)
        assert not recording.calls and recording.untrained == {"aborted": 1}
        recording.model = whole

    run(attack)


def test_the_end_of_an_episode_aborts_its_calls():
    async def attack(scene):
        engine = Waiting(scene.script)
        recording = Recording(make_pool(None, generate=engine)[0].model, 1, 0, Session("1", 0))
        async with scene.endpoint.session(recording) as llm:
            sent = asyncio.create_task(scene.post(llm, CHAT, ONE))
            await engine.begun.wait()
        assert engine.aborted == 1
        status, body, _ = await sent
        assert status == 401 and body["error"]["message"] == "the episode has ended"
        assert not recording.calls

    run(attack)


def test_a_stream_that_nobody_reads_to_the_end_is_context(monkeypatch):
    """A client that reads the head of a stream and goes away."""

    async def attack(scene):
        recording = scene.recordings[0]
        send = endpoint_module.web.StreamResponse.write
        written = asyncio.Event()

        async def slow(response, data):
            await send(response, data)
            written.set()
            await asyncio.sleep(0.05)

        monkeypatch.setattr(endpoint_module.web.StreamResponse, "write", slow)
        sent = asyncio.create_task(scene.post(scene.mine, CHAT, ONE | {"stream": True}))
        await written.wait()
        sent.cancel()
        async with asyncio.timeout(5):
            while not recording.untrained:
                await asyncio.sleep(0.01)
        monkeypatch.undo()
        ((_, _, step),) = recording.calls
        assert not step.loss_mask.any() and recording.untrained == {"aborted": 1}

    run(attack)


def test_a_client_that_does_not_read_its_stream(monkeypatch):
    """Its connection ends after a time, and its answer is context."""
    monkeypatch.setattr(endpoint_module, "SEND_TIMEOUT_S", 0.2)

    async def attack(scene):
        recording = scene.recordings[0]

        async def never(response, data):
            await asyncio.sleep(60)

        monkeypatch.setattr(endpoint_module.web.StreamResponse, "write", never)
        with pytest.raises(aiohttp.ClientError):
            await scene.post(scene.mine, CHAT, ONE | {"stream": True})
        monkeypatch.undo()
        ((_, _, step),) = recording.calls
        assert not step.loss_mask.any() and recording.untrained == {"aborted": 1}

    run(attack)


def test_a_slow_request_ends_after_its_time(monkeypatch):
    monkeypatch.setattr(endpoint_module, "BODY_TIMEOUT_S", 0.2)

    async def attack(scene):
        _, _, address = scene.mine.base_url.partition("://")
        host, port = address.partition("/")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        path = "/" + address.partition("/")[2] + "/chat/completions"
        key = scene.mine.api_key
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        await scene.check_both_work()
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()

    run(attack)


def test_nothing_leaks_between_episodes():
    """Both episodes repeat the same text; only one of them sampled it, in other tokens."""

    async def attack(scene):
        scene.script.replies = [TWO_TOKENS, "no<|im_end|>"]
        for llm in (scene.mine, scene.other):
            assert (await scene.post(llm, CHAT, ONE))[0] == 200
        scene.script.replies = ["ab<|im_end|>"]
        history = [user("?"), {"role": "assistant", "content": "ab"}, user("more")]
        for llm in (scene.mine, scene.other):
            assert (await scene.post(llm, CHAT, {"messages": history}))[0] == 200
        mine, other = [recording.steps()[1].prompt_ids for recording in scene.recordings]
        decode = scene.recordings[0].model.renderer.tokenizer.decode
        assert decode(mine) == decode(other) and len(mine) == len(other) + 1

    run(attack)


def test_fifty_bad_requests_at_once_disturb_nobody():
    async def attack(scene):
        bad = [scene.post(scene.mine, path, sent) for path, sent, _, _ in BAD.values()]
        good = [scene.post(scene.other, CHAT, ONE) for _ in range(10)]
        answers = await asyncio.gather(*bad, *good)
        assert len(bad) >= 50
        assert [status for status, _, _ in answers[: len(bad)]] == [bad[2] for bad in BAD.values()]
        assert [status for status, _, _ in answers[len(bad) :]] == [200] * 10
        assert len(scene.recordings[1].calls) == 10

    run(attack)
