"""Anthropic's wire format: /v1/messages, whole or as events."""

from collections.abc import Iterator
from typing import Any

from megastep.rollout.calls import (
    Answer,
    CallError,
    Choice,
    ModelCall,
    bad_request,
    integer,
    joined_text,
    message_list,
    number,
    parsed_arguments,
    stops,
)
from megastep.rollout.env import Message
from megastep.rollout.openai_api import choose_tool, role_of, tools_of
from megastep.text import shorten

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


# ---------------------------------------------------------------- requests


def messages_call(body: dict[str, Any]) -> ModelCall:
    """The body of a request to /v1/messages."""
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": joined_text(body["system"], "system")})
    for i, message in enumerate(message_list(body)):
        messages += _messages(message, f"messages[{i}]")
    call = ModelCall(
        messages,
        max_tokens=integer(body, "max_tokens", 1, 2**31 - 1),
        temperature=number(body, "temperature", 0, 100),
        top_p=number(body, "top_p", 1e-6, 1),
        top_k=integer(body, "top_k", 0, 2**31 - 1),
        stop=stops(body.get("stop_sequences"), "stop_sequences"),
        role=role_of(body.get("model")),
        tools=tools_of(_tools(body.get("tools"))),
    )
    choose_tool(call, _tool_choice(body.get("tool_choice")))
    return call


def _messages(message: dict[str, Any], where: str) -> list[Message]:
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant"):
        raise bad_request(f"{where}.role is {shorten(role)}; user or assistant is needed")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{where}.content is {shorten(content)}; text or blocks are needed")
    return _answer(content, where) if role == "assistant" else _from_user(content, where)


def _answer(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    texts = []
    calls = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(joined_text([block], where))
        elif kind == "tool_use":
            name = block.get("name")
            arguments = block.get("input")
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise bad_request(f"{where}: tool_use needs a name and an input")
            function = {"name": name, "arguments": arguments}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            raise bad_request(f"{where} has a block of type {shorten(kind)}; the model reads text")
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [message]


def _from_user(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    """Results of tools are messages of their own; the texts between them are the user's."""
    messages: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            messages.append(
                {
                    "role": "tool",
                    "content": joined_text(block.get("content"), where),
                    "tool_call_id": str(block.get("tool_use_id")),
                }
            )
            continue
        text = joined_text([block], where)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": "user", "content": text})
    return messages


def _tools(tools: Any) -> Any:
    """Anthropic's tools in OpenAI's form."""
    if not isinstance(tools, list):
        return tools
    made = []
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
            raise bad_request(f"tools has {shorten(tool)}; a name and an input_schema are needed")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool["input_schema"],
        }
        made.append({"type": "function", "function": function})
    return made


def _tool_choice(choice: Any) -> Any:
    if choice is None:
        return None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"function": {"name": choice.get("name")}}
    simple = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in simple:
        raise bad_request(f"tool_choice is {shorten(choice)}; auto, any, tool or none is needed")
    return simple[kind]


# ---------------------------------------------------------------- responses


def error_body(error: CallError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else None)
    return {
        "type": "error",
        "error": {"type": kind or "invalid_request_error", "message": error.message},
    }


def message_body(answer: Answer, model: str) -> dict[str, Any]:
    choice = answer.choices[0]
    usage = _usage(answer) | {"output_tokens": answer.response_tokens}
    return _message(answer, model) | _stop(choice) | {"content": _blocks(choice), "usage": usage}


def _message(answer: Answer, model: str) -> dict[str, Any]:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": model}


def _stop(choice: Choice) -> dict[str, Any]:
    reason = "stop_sequence" if choice.stop is not None else _STOP_REASONS[choice.finish]
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text or not (choice.reasoning or choice.tool_calls):
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.tool_calls:
        arguments = parsed_arguments(call.arguments)
        given = arguments if isinstance(arguments, dict) else {}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


# ---------------------------------------------------------------- events


def message_events(answer: Answer, model: str) -> Iterator[dict[str, Any]]:
    choice = answer.choices[0]
    begun = _message(answer, model) | {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer) | {"output_tokens": 0},
    }
    yield {"type": "message_start", "message": begun}
    arguments = [call.arguments for call in choice.tool_calls]
    for i, block in enumerate(_blocks(choice)):
        start, delta = _in_two(block, arguments)
        yield {"type": "content_block_start", "index": i, "content_block": start}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    usage = _usage(answer) | {"output_tokens": answer.response_tokens}
    yield {"type": "message_delta", "delta": _stop(choice), "usage": usage}
    yield {"type": "message_stop"}


def _in_two(block: dict[str, Any], arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block as its start and what follows; `arguments` of the tool calls that are left."""
    if block["type"] == "text":
        return block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
    if block["type"] == "thinking":
        delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        return block | {"thinking": ""}, delta
    return block | {"input": {}}, {"type": "input_json_delta", "partial_json": arguments.pop(0)}
