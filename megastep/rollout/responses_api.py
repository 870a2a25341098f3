"""OpenAI's wire format /v1/responses, whole or as events; conversations are not stored."""

import time
from collections.abc import Iterator
from typing import Any

from megastep.rollout.calls import (
    MAX_MESSAGES,
    Answer,
    Choice,
    ModelCall,
    bad_request,
    integer,
    joined_text,
    number,
    parsed_arguments,
)
from megastep.rollout.env import Message
from megastep.rollout.openai_api import choose_tool, role_of, tools_of
from megastep.text import shorten

_TEXTS = ("input_text", "output_text", "text")
_IGNORED = ("reasoning", "item_reference")


# ---------------------------------------------------------------- requests


def responses_call(body: dict[str, Any]) -> ModelCall:
    """The body of a request to /v1/responses."""
    for key in ("previous_response_id", "conversation", "prompt"):
        if body.get(key) is not None:
            raise bad_request(f"{key}: conversations are not stored; send the whole input")
    text = body.get("text") or {}
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type", "text") != "text":
        raise bad_request("text.format: the engine has no grammars; only text is possible")
    call = ModelCall(
        _messages(body),
        max_tokens=integer(body, "max_output_tokens", 1, 2**31 - 1),
        temperature=number(body, "temperature", 0, 100),
        top_p=number(body, "top_p", 1e-6, 1),
        role=role_of(body.get("model")),
        tools=tools_of(_tools(body.get("tools"))),
    )
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"function": {"name": choice.get("name")}}
    choose_tool(call, choice)
    return call


def _messages(body: dict[str, Any]) -> list[Message]:
    messages: list[Message] = []
    if body.get("instructions"):
        text = joined_text(body["instructions"], "instructions", _TEXTS)
        messages.append({"role": "system", "content": text})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise bad_request(f"input is {shorten(given)}; text or a list of items is needed")
    if len(items) > MAX_MESSAGES:
        raise bad_request(f"input: {len(items)} items; at most {MAX_MESSAGES} are rendered")
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    return messages


def _add(messages: list[Message], item: Any, where: str) -> None:
    """Append an item; tool calls belong to the turn that they follow."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise bad_request(f"{where}.role is {shorten(role)}")
        text = joined_text(item.get("content"), f"{where}.content", _TEXTS)
        messages.append({"role": "system" if role == "developer" else role, "content": text})
    elif kind == "function_call":
        name = item.get("name")
        if not isinstance(name, str):
            raise bad_request(f"{where}: a function_call needs a name")
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": name, "arguments": parsed_arguments(item.get("arguments") or "{}")}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = joined_text(item.get("output"), f"{where}.output", _TEXTS)
        id = str(item.get("call_id"))
        messages.append({"role": "tool", "content": text, "tool_call_id": id})
    elif kind not in _IGNORED:
        raise bad_request(f"{where} is {shorten(item)}; the model reads messages and tool calls")


def _tools(tools: Any) -> Any:
    """The tools in the form of /v1/chat/completions."""
    if not isinstance(tools, list):
        return tools
    made = []
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise bad_request(f"tools has {shorten(tool)}; functions are possible only")
        made.append({"type": "function", "function": tool})
    return made


# ---------------------------------------------------------------- responses


def response_body(answer: Answer, model: str) -> dict[str, Any]:
    choice = answer.choices[0]
    is_whole = choice.finish != "length"
    reason = None if is_whole else {"reason": "max_output_tokens"}
    return _begun(answer, model) | {
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": reason,
        "output": _items(answer.id, choice),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.response_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.response_tokens,
        },
    }


def _begun(answer: Answer, model: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _items(id: str, choice: Choice) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        content = [{"type": "reasoning_text", "text": choice.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": content})
    if choice.text or not (choice.reasoning or choice.tool_calls):
        part = {"type": "output_text", "text": choice.text, "annotations": []}
        message = {"type": "message", "id": f"msg_{id}", "role": "assistant", "content": [part]}
        items.append(message | {"status": "completed"})
    for call in choice.tool_calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


# ---------------------------------------------------------------- events


def response_events(answer: Answer, model: str) -> Iterator[dict[str, Any]]:
    for place, event in enumerate(_events(answer, model)):
        yield event | {"sequence_number": place}


def _events(answer: Answer, model: str) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": _begun(answer, model)}
    whole = response_body(answer, model)
    for i, item in enumerate(whole["output"]):
        place = {"output_index": i, "item_id": item["id"]}
        yield {"type": "response.output_item.added", "output_index": i, "item": _empty(item)}
        if item["type"] == "message":
            yield from _text_events(item["content"][0], place)
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            kind = "response.function_call_arguments"
            yield {"type": f"{kind}.delta", "delta": arguments} | place
            yield {"type": f"{kind}.done", "arguments": arguments, "name": item["name"]} | place
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """An item before its content."""
    empty: dict[str, dict[str, Any]] = {
        "message": {"content": []},
        "function_call": {"arguments": ""},
    }
    return item | empty.get(item["type"], {})


def _text_events(part: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    place = place | {"content_index": 0}
    text = part["text"]
    yield {"type": "response.content_part.added", "part": part | {"text": ""}} | place
    yield {"type": "response.output_text.delta", "delta": text, "logprobs": []} | place
    yield {"type": "response.output_text.done", "text": text, "logprobs": []} | place
    yield {"type": "response.content_part.done", "part": part} | place
