"""OpenAI's wire formats: /v1/chat/completions and /v1/completions, whole or as events."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from megastep.rollout.calls import (
    MAX_CHOICES,
    Answer,
    CallError,
    Choice,
    ModelCall,
    bad_request,
    flag,
    integer,
    joined_text,
    message_list,
    number,
    parsed_arguments,
    stops,
)
from megastep.rollout.env import Message
from megastep.rollout.recording import as_openai
from megastep.text import shorten

MODEL = "policy"
_MAX_TOKENS = 2**31 - 1
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Parameters of vLLM beyond temperature, top_p and top_k, and the value that changes nothing.
_EXTRA: dict[str, tuple[float, float, float]] = {
    "frequency_penalty": (0.0, -2, 2),
    "presence_penalty": (0.0, -2, 2),
    "repetition_penalty": (1.0, 0.01, 10),
    "min_p": (0.0, 0, 1),
}


# ---------------------------------------------------------------- requests


def chat_call(body: dict[str, Any]) -> ModelCall:
    """The body of a request to /v1/chat/completions."""
    call = _sampled_call(body)
    call.messages = [_message(m, i) for i, m in enumerate(message_list(body))]
    call.tools = tools_of(body.get("tools"))
    call.logprobs = flag(body, "logprobs")
    if body.get("top_logprobs"):
        raise bad_request("top_logprobs: only the logprob of the sampled token is recorded; send 0")
    response_format = body.get("response_format") or {"type": "text"}
    if not isinstance(response_format, dict) or response_format.get("type") != "text":
        raise bad_request("response_format: the engine has no grammars; only text is possible")
    choose_tool(call, body.get("tool_choice"))
    return call


def completion_call(body: dict[str, Any]) -> ModelCall:
    """The body of a request to /v1/completions."""
    call = _sampled_call(body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        call.prompt = prompt
    elif isinstance(prompt, list) and all(type(id) is int and 0 <= id < 2**31 for id in prompt):
        call.prompt = np.array(prompt, np.int32)
    else:
        raise bad_request(f"prompt is {shorten(prompt)}; one text or one list of ids is needed")
    call.logprobs = body.get("logprobs") is not None
    if flag(body, "echo") or body.get("suffix"):
        raise bad_request("echo and suffix are not supported")
    return call


def _sampled_call(body: dict[str, Any]) -> ModelCall:
    most = integer(body, "max_completion_tokens", 1, _MAX_TOKENS)
    extra: dict[str, Any] = {}
    for key, (neutral, low, high) in _EXTRA.items():
        value = number(body, key, low, high)
        if value is not None and value != neutral:
            extra[key] = value
    if bias := logit_bias(body.get("logit_bias")):
        extra["logit_bias"] = bias
    return ModelCall(
        messages=None,
        max_tokens=most or integer(body, "max_tokens", 1, _MAX_TOKENS),
        temperature=number(body, "temperature", 0, 100),
        top_p=number(body, "top_p", 1e-6, 1),
        top_k=integer(body, "top_k", 0, _MAX_TOKENS),
        seed=integer(body, "seed", -(2**62), 2**62),
        stop=stops(body.get("stop"), "stop"),
        choices=integer(body, "n", 1, MAX_CHOICES) or 1,
        role=role_of(body.get("model")),
        extra=extra,
    )


def role_of(model: Any) -> str | None:
    """`policy:planner` → planner; any other name of a model is the policy's too."""
    if model is not None and not isinstance(model, str):
        raise bad_request(f"model is {shorten(model)}; a name is needed")
    prefix, colon, role = (model or "").partition(":")
    return role if prefix == MODEL and colon and role else None


def logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    try:
        bias = {int(id): float(amount) for id, amount in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise bad_request(f"logit_bias is {shorten(value)}; {{id: number}} is needed") from None
    if any(not -100 <= amount <= 100 for amount in bias.values()):
        raise bad_request("logit_bias: numbers from -100 to 100 are needed")
    if any(not 0 <= id < 2**31 for id in bias):
        raise bad_request("logit_bias: token ids are needed as keys")
    return bias


def tools_of(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_request(f"tools is {shorten(tools)}; a list is needed")
    found = []
    for i, tool in enumerate(tools):
        function: Any = tool.get("function") if isinstance(tool, dict) else None
        valid = (
            isinstance(function, dict)
            and isinstance(function.get("name"), str)
            and isinstance(function.get("parameters") or {}, dict)
            and isinstance(function.get("description") or "", str)
        )
        if not valid:
            raise bad_request(
                f"tools[{i}] is {shorten(tool)}; "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}} is needed'
            )
        kept = {
            key: function[key]
            for key in ("name", "description", "parameters")
            if function.get(key) is not None
        }
        found.append({"type": "function", "function": kept})
    return found


def choose_tool(call: ModelCall, choice: Any) -> None:
    """`none` hides the tools; a named one, or the only one if it is required, is forced."""
    names = [tool["function"]["name"] for tool in call.tools]
    if choice in (None, "auto"):
        return
    if choice == "none":
        call.tools = []
    elif choice == "required" and len(names) == 1:
        call.forced_tool = names[0]
    elif choice == "required":
        raise bad_request("tool_choice = required: with several tools, name the one to call")
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise bad_request(f"tool_choice is {shorten(choice)}; one of the tools is needed")
        call.forced_tool = name


def _message(message: dict[str, Any], i: int) -> Message:
    """A message as chat templates and `turns.SampledTurns` read it."""
    role = message.get("role")
    if role not in _ROLES:
        raise bad_request(f"messages[{i}].role is {shorten(role)}; one of {', '.join(_ROLES)}")
    where = f"messages[{i}].content"
    made: Message = {
        "role": "system" if role == "developer" else role,
        "content": joined_text(message.get("content"), where, ("text", "refusal")),
    }
    if role not in ("assistant", "tool") and message.get("content") is None:
        raise bad_request(f"{where} is missing")
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise bad_request(f"messages[{i}].{key} is {shorten(value)}; text is needed")
        if value:
            made[key] = value
    if message.get("tool_calls"):
        made["tool_calls"] = _tool_calls(message["tool_calls"], f"messages[{i}].tool_calls")
    return made


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{where} is {shorten(calls)}; a list is needed")
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where} has {shorten(call)}; a function with a name is needed")
        arguments = parsed_arguments(function.get("arguments") or "{}")
        parsed = {"name": function["name"], "arguments": arguments}
        made.append({"id": str(call.get("id") or ""), "type": "function", "function": parsed})
    return made


# ---------------------------------------------------------------- responses


def error_body(error: CallError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "server_error" if error.status >= 500 else None)
    return {
        "error": {
            "message": error.message,
            "type": kind or "invalid_request_error",
            "param": None,
            "code": error.code,
        }
    }


def models_body() -> dict[str, Any]:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megastep"}
    return {"object": "list", "data": [model]}


def chat_body(answer: Answer, model: str) -> dict[str, Any]:
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", **_contents(choice)},
            "logprobs": _chat_logprobs(choice),
            "finish_reason": choice.finish,
        }
        for i, choice in enumerate(answer.choices)
    ]
    return _body("chat.completion", answer, model) | {"choices": choices, "usage": usage(answer)}


def _contents(choice: Choice) -> dict[str, Any]:
    """Content, reasoning and tool calls of a message."""
    has_text = choice.text or not (choice.tool_calls or choice.reasoning)
    found: dict[str, Any] = {"content": choice.text if has_text else None}
    if choice.reasoning:
        found["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        found["tool_calls"] = [as_openai(call) for call in choice.tool_calls]
    return found


def _chat_logprobs(choice: Choice) -> dict[str, Any] | None:
    if not choice.tokens:
        return None
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(choice.tokens, choice.logprobs)
        ]
    }


def completion_body(answer: Answer, model: str) -> dict[str, Any]:
    choices = [_completion_choice(i, choice) for i, choice in enumerate(answer.choices)]
    return _body("text_completion", answer, model) | {"choices": choices, "usage": usage(answer)}


def _completion_choice(i: int, choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.tokens:
        ends = np.cumsum([0, *map(len, choice.tokens)]).tolist()
        logprobs = {
            "tokens": choice.tokens,
            "token_logprobs": choice.logprobs,
            "top_logprobs": None,
            "text_offset": ends[:-1],
        }
    return {
        "index": i,
        "text": choice.text,
        "token_ids": choice.ids,
        "logprobs": logprobs,
        "finish_reason": choice.finish,
    }


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.response_tokens,
        "total_tokens": answer.prompt_tokens + answer.response_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _body(kind: str, answer: Answer, model: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": int(time.time()), "model": model}


# ---------------------------------------------------------------- events


def chat_events(answer: Answer, model: str, with_usage: bool) -> Iterator[dict[str, Any]]:
    """The chunks of a stream; the engine answers a call at once, so they are few."""
    chunk = _body("chat.completion.chunk", answer, model)
    for i, choice in enumerate(answer.choices):
        for delta in _deltas(choice):
            part = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            yield chunk | {"choices": [part]}
        end = {
            "index": i,
            "delta": {},
            "logprobs": _chat_logprobs(choice),
            "finish_reason": choice.finish,
        }
        yield chunk | {"choices": [end]}
    if with_usage:
        yield chunk | {"choices": [], "usage": usage(answer)}


def _deltas(choice: Choice) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if choice.reasoning:
        yield {"reasoning_content": choice.reasoning}
    if choice.text:
        yield {"content": choice.text}
    for i, call in enumerate(choice.tool_calls):
        yield {"tool_calls": [{"index": i, **as_openai(call)}]}


def completion_events(answer: Answer, model: str, with_usage: bool) -> Iterator[dict[str, Any]]:
    chunk = _body("text_completion", answer, model)
    for i, choice in enumerate(answer.choices):
        yield chunk | {"choices": [_completion_choice(i, choice)]}
    if with_usage:
        yield chunk | {"choices": [], "usage": usage(answer)}
