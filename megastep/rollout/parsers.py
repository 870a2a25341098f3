"""Reasoning and tool calls in a response, by vLLM's parsers.

`auto` chooses a parser by what the chat template writes. vLLM takes seconds to import: it is
imported in a thread, when the first response needs a parser.
"""

import asyncio
import json
import logging
from collections import OrderedDict
from typing import Any, NamedTuple

from megastep.errors import ConfigError
from megastep.rollout.calls import ToolCall

AUTO = "auto"
NONE = "none"
# What a chat template contains → vLLM's parser; the first that applies.
TOOL_PARSERS = {
    "<function=": "qwen3_coder",
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "<|channel|>": "openai",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    "<tool_call>": "hermes",
}
REASONING_PARSERS = {"<|channel|>": "openai_gptoss", "<think>": "qwen3", "</think>": "qwen3"}
_KEPT = 64  # parsers, one per list of tools


class Parsed(NamedTuple):
    text: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


class Parsers:
    """For one tokenizer; used by one event loop at a time."""

    def __init__(self, tokenizer: Any, tool_parser: str = AUTO, reasoning_parser: str = AUTO):
        self.tokenizer = tokenizer
        self.tool_parser = _chosen(tokenizer, tool_parser, TOOL_PARSERS)
        self.reasoning_parser = _chosen(tokenizer, reasoning_parser, REASONING_PARSERS)
        self._loaded = False
        self._reasoning: Any = None
        self._tools: OrderedDict[str, Any] = OrderedDict()

    def check(self) -> None:
        """ConfigError for a name that vLLM does not have."""
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        problems = []
        for key, name, find in (
            ("tool_parser", self.tool_parser, ToolParserManager.get_tool_parser),
            (
                "reasoning_parser",
                self.reasoning_parser,
                ReasoningParserManager.get_reasoning_parser,
            ),
        ):
            try:
                if name is not None:
                    find(name)
            except KeyError:
                problems.append(f"agent.{key} = {name}: vLLM has no such parser")
        if problems:
            raise ConfigError(problems)

    async def parse(self, text: str, before: str, tools: list[dict[str, Any]]) -> Parsed:
        """The parts of a response. `before`: the end of its prompt, which may open it."""
        wants_tools = bool(tools) and self.tool_parser is not None
        if not wants_tools and self.reasoning_parser is None:
            return Parsed(text)
        if not self._loaded:
            await asyncio.to_thread(self._load)
        parsed = self._without_reasoning(text, before)
        return self._with_tool_calls(parsed, tools) if wants_tools else parsed

    def _load(self) -> None:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager  # noqa: F401

        if self.reasoning_parser is not None and self._reasoning is None:
            kind = ReasoningParserManager.get_reasoning_parser(self.reasoning_parser)
            self._reasoning = kind(self.tokenizer)
        # A response without a valid call is no error: a model in training samples many.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._loaded = True

    def _without_reasoning(self, text: str, before: str) -> Parsed:
        parser = self._reasoning
        if parser is None:
            return Parsed(text)
        start = parser.reasoning_start_str
        end = parser.reasoning_end_str
        if start is not None and end is not None:
            # Some of vLLM's parsers take a response without marks for reasoning.
            is_open = before.rfind(start) > before.rfind(end)
            if not is_open and start not in text and end not in text:
                return Parsed(text)
        reasoning, content = parser.extract_reasoning(text, _request([]))
        return Parsed(content or "", reasoning or "")

    def _with_tool_calls(self, parsed: Parsed, tools: list[dict[str, Any]]) -> Parsed:
        request = _request(tools)
        found = self._tool_parser_for(tools, request).extract_tool_calls(parsed.text, request)
        if not found.tools_called:
            return parsed
        calls = [
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in found.tool_calls
        ]
        return Parsed(found.content or "", parsed.reasoning, calls)

    def _tool_parser_for(self, tools: list[dict[str, Any]], request: Any) -> Any:
        from vllm.tool_parsers import ToolParserManager

        key = json.dumps(tools)
        if key not in self._tools:
            kind = ToolParserManager.get_tool_parser(self.tool_parser)
            self._tools[key] = kind(self.tokenizer, request.tools)
            if len(self._tools) > _KEPT:
                self._tools.popitem(last=False)
        self._tools.move_to_end(key)
        return self._tools[key]


def _chosen(tokenizer: Any, name: str, by_template: dict[str, str]) -> str | None:
    if name == NONE:
        return None
    if name != AUTO:
        return name
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template)
    return next((parser for mark, parser in by_template.items() if mark in text), None)


def _request(tools: list[dict[str, Any]]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest,
        ChatCompletionToolsParam,
    )

    # Checked already: pydantic's validation of whole requests takes longer than the parsing.
    return ChatCompletionRequest.model_construct(
        messages=[],
        tools=[ChatCompletionToolsParam.model_validate(tool) for tool in tools] or None,
        tool_choice="auto" if tools else "none",
    )
