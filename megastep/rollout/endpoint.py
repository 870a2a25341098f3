"""An HTTP server through which agent programs call the model, in the event loop of the episodes.

    OPENAI_BASE_URL      http://HOST:PORT/EPISODE/v1     /chat/completions, /completions,
                                                         /responses, /models
    ANTHROPIC_BASE_URL   http://HOST:PORT/EPISODE        /v1/messages, /v1/models

Each episode has a path and a key of its own, both unguessable, which expire with it. A client that
goes away aborts its call. A stream is sent when the engine has answered: its events are those of
the API, its first token comes with the last.

Invariants, held by the tests:
    A request without the episode's key gets 401 and reaches no recording.
    A request never disturbs another episode: bodies are bounded in size and time, and every problem
    is a status with a message in the form that the SDKs expect.
    When an episode ends its running calls are aborted, and none is answered afterwards.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megastep.rollout import anthropic_api, openai_api, responses_api
from megastep.rollout.calls import Answer, CallError, ModelCall, flag, read_json
from megastep.rollout.recording import Recording
from megastep.text import describe

BODY_TIMEOUT_S = 60.0  # for a client to send its request
SEND_TIMEOUT_S = 60.0  # for a client to read an event
LONG_BODY = 1 << 20  # bytes whose JSON is parsed in a thread
ROLE_HEADER = "X-Megastep-Role"
CALL_HEADER = "X-Megastep-Call"
_NO_RETRY = {"x-should-retry": "false"}  # the SDKs would repeat what cannot succeed
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class LLM:
    """The address of the model for one episode."""

    base_url: str  # of OpenAI clients
    anthropic_base_url: str
    api_key: str
    host: str = "127.0.0.1"
    model: str = openai_api.MODEL

    def variables(self) -> dict[str, str]:
        """Environment variables that the SDKs read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "NO_PROXY": self.host,
        }


@dataclass(eq=False)
class _Episode:
    recording: Recording
    key: str
    running: set[asyncio.Task] = field(default_factory=set)


class Endpoint:
    """Listens while it has episodes; `session` is used in one event loop at a time."""

    def __init__(self, host: str = "127.0.0.1", max_body_mb: int = 32, port: int = 0):
        """port: 0: any that is free."""
        self.host = host
        self._max_body = max_body_mb << 20
        self._wanted_port = port
        self._episodes: dict[str, _Episode] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._users = 0
        self._starting: asyncio.Lock | None = None

    @contextlib.asynccontextmanager
    async def session(self, recording: Recording) -> AsyncIterator[LLM]:
        """The address under which the recording's episode calls the model."""
        await self._open()
        path = secrets.token_urlsafe(12)
        episode = _Episode(recording, secrets.token_urlsafe(24))
        self._episodes[path] = episode
        root = f"http://{self.host}:{self._port}/{path}"
        try:
            yield LLM(f"{root}/v1", root, episode.key, self.host)
        finally:
            del self._episodes[path]
            await _abort(episode.running)
            await self._close()

    async def _open(self) -> None:
        self._users += 1
        if self._users == 1:
            self._starting = asyncio.Lock()  # of this event loop
        assert self._starting is not None
        async with self._starting:
            if self._runner is None:
                self._runner = await self._start()

    async def _start(self) -> web.AppRunner:
        application = web.Application(client_max_size=self._max_body, middlewares=[_answered])
        application.add_routes(
            [
                web.get("/{episode}/v1/models", self._models),
                web.post("/{episode}/v1/chat/completions", self._chat),
                web.post("/{episode}/v1/completions", self._completions),
                web.post("/{episode}/v1/responses", self._responses),
                web.post("/{episode}/v1/messages", self._messages),
                web.post("/{episode}/v1/messages/count_tokens", self._count_tokens),
            ]
        )
        runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await runner.setup()
        site = web.TCPSite(runner, self.host, self._wanted_port, backlog=1024)
        await site.start()
        self._port = runner.addresses[0][1]
        return runner

    async def _close(self) -> None:
        """Stop listening after the last episode: its event loop may end."""
        self._users -= 1
        if self._users == 0 and self._runner is not None:
            runner = self._runner
            self._runner = None
            await runner.cleanup()

    # ------------------------------------------------------------ handlers

    async def _models(self, request: web.Request) -> web.Response:
        self._episode(request)
        return _json(openai_api.models_body())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(
            request, openai_api.chat_call, openai_api.chat_body, openai_api.chat_events
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(
            request,
            openai_api.completion_call,
            openai_api.completion_body,
            openai_api.completion_events,
        )

    async def _answer(
        self,
        request: web.Request,
        read: Callable[[dict[str, Any]], ModelCall],
        write: Callable[[Answer, str], dict[str, Any]],
        events: Callable[[Answer, str, bool], Iterator[dict[str, Any]]],
    ) -> web.StreamResponse:
        """A call of an API whose events have no names."""
        episode = self._episode(request)
        body = await _body(request)
        model = str(body.get("model") or openai_api.MODEL)
        is_stream = flag(body, "stream")
        options = body.get("stream_options") or {}
        with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        answer = await _call(episode, request, read(body))
        if not is_stream:
            return _json(write(answer, model), answer)
        lines = [f"data: {json.dumps(event)}\n\n" for event in events(answer, model, with_usage)]
        return await _send_events(request, episode, answer, [*lines, "data: [DONE]\n\n"])

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._answer_named(
            request,
            anthropic_api.messages_call,
            anthropic_api.message_body,
            anthropic_api.message_events,
        )

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._answer_named(
            request,
            responses_api.responses_call,
            responses_api.response_body,
            responses_api.response_events,
        )

    async def _answer_named(
        self,
        request: web.Request,
        read: Callable[[dict[str, Any]], ModelCall],
        write: Callable[[Answer, str], dict[str, Any]],
        events: Callable[[Answer, str], Iterator[dict[str, Any]]],
    ) -> web.StreamResponse:
        """A call of an API whose events have names."""
        episode = self._episode(request)
        body = await _body(request)
        model = str(body.get("model") or openai_api.MODEL)
        is_stream = flag(body, "stream")
        answer = await _call(episode, request, read(body))
        if not is_stream:
            return _json(write(answer, model), answer)
        lines = [
            f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
            for event in events(answer, model)
        ]
        return await _send_events(request, episode, answer, lines)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        call = anthropic_api.messages_call(await _body(request))
        return _json({"input_tokens": await episode.recording.prompt_tokens(call)})

    def _episode(self, request: web.Request) -> _Episode:
        """The episode of the request's path, if the request has its key."""
        header = request.headers.get("Authorization", "")
        given = header.removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        episode = self._episodes.get(request.match_info["episode"])
        key = "" if episode is None else episode.key
        is_right = hmac.compare_digest(given.encode("utf-8", "replace"), key.encode())
        if episode is None or not is_right:
            raise CallError(401, "wrong or expired key", "invalid_api_key")
        return episode


async def _abort(calls: set[asyncio.Task]) -> None:
    for call in calls:
        call.cancel()
    if calls:
        await asyncio.wait(calls)


async def _call(episode: _Episode, request: web.Request, call: ModelCall) -> Answer:
    call.role = request.headers.get(ROLE_HEADER) or call.role
    task = asyncio.ensure_future(episode.recording.answer(call))
    episode.running.add(task)
    try:
        return await task
    except asyncio.CancelledError:
        task.cancel()
        if (own := asyncio.current_task()) is not None and own.cancelling():
            raise  # the client went away
        raise CallError(401, "the episode has ended", "invalid_api_key") from None
    finally:
        episode.running.discard(task)


# ---------------------------------------------------------------- requests and responses


@web.middleware
async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every problem is a response in the form of its API."""
    try:
        return await handler(request)
    except CallError as error:
        problem = error
    except web.HTTPException as error:
        problem = CallError(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:
        problem = CallError(500, describe(error))
    api = anthropic_api if "/v1/messages" in request.path else openai_api
    return _json(api.error_body(problem), status=problem.status)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            content = await request.read()
    except TimeoutError:
        raise CallError(408, f"no whole request within {BODY_TIMEOUT_S:g} s") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise CallError(413, f"the request is too large: {error.text}") from None
    if len(content) > LONG_BODY:
        return await asyncio.to_thread(read_json, content)
    return read_json(content)


def _json(body: dict[str, Any], answer: Answer | None = None, status: int = 200) -> web.Response:
    headers = dict(_NO_RETRY) if status != 200 else {}
    if answer is not None:
        headers[CALL_HEADER] = answer.id
    return web.Response(
        body=json.dumps(body).encode(),
        status=status,
        headers=headers,
        content_type="application/json",
    )


async def _send_events(
    request: web.Request, episode: _Episode, answer: Answer, lines: Iterable[str]
) -> web.StreamResponse:
    """Server-sent events; a client that does not read them to the end aborts its call."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    response.headers[CALL_HEADER] = answer.id
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await response.prepare(request)
            for line in lines:
                await response.write(line.encode())
            await response.write_eof()
    except asyncio.CancelledError:
        episode.recording.drop(answer.id)
        raise
    except (ConnectionError, TimeoutError):
        episode.recording.drop(answer.id)
        if request.transport is not None:
            request.transport.abort()  # no other response can follow
    return response
