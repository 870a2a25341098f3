"""Conversations as demonstrations: each assistant turn is a step, trained by `nll`.

A row of `warm_start.data` (a source as in rollout/data.py) has the columns

    messages   chat messages: the first is not the assistant's, one at least is. An assistant
               message with `weight: 0` is context (the format of OpenAI's fine-tuning files)
    tools      optional: JSON schemas for the chat template

The prompts of later turns are those of a rollout: `rollout.mode` decides whether they extend the
turns before or are rendered anew. Steps of a conversation fold into a trie like those of a rollout.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from megastep.errors import DataError, RenderError
from megastep.rollout.data import SHOWN_PROBLEMS, file_rows
from megastep.rollout.env import Message, are_tool_calls
from megastep.rollout.renderer import Renderer
from megastep.samples.prefix import share_prefixes
from megastep.types import Group, Step, StopReason, Trajectory

ASSISTANT = "assistant"
MAX_DEPTH = 100
ASSISTANT_KEYS = {"role", "content", "tool_calls", "weight", "name"}


def read_conversations(source: str, renderer: Renderer, limit: int = 0) -> list[Group]:
    """One group per row, the first `limit` of them (0: all); raises DataError by row."""
    groups: list[Group] = []
    problems: list[str] = []
    # A column of Parquet has the keys of all its rows, null where a row has none. In JSON lines a
    # null within the arguments of a call is a value.
    depth = 2 if source.endswith(".jsonl") else MAX_DEPTH
    for where, row in file_rows(source):
        if len(problems) == SHOWN_PROBLEMS:
            raise DataError([*problems, f"{source}: the rows after these were not read"])
        try:
            if isinstance(row, str):  # the problem with the row
                raise DataError(row)
            groups.append(_group_of_row(len(groups), _without_nulls(row, depth), renderer))
        except (DataError, RenderError) as error:
            problems.append(f"{where}: {error}")
        if limit and len(groups) == limit:
            break
    if problems:
        raise DataError(problems)
    if not groups:
        raise DataError(f"{source}: has no rows")
    steps = (step for group in groups for step in group.trajectories[0].steps)
    if not any(step.loss_mask.any() for step in steps):
        raise DataError(f"{source}: every assistant message has weight 0: nothing is trained")
    return groups


def demonstration(
    number: int,
    messages: list[Message],
    renderer: Renderer,
    metrics: dict[str, Any] | None = None,
    reward: float = 0.0,
) -> Group:
    """A conversation as a group of one trajectory, without logprobs; its last step has the reward.

    Messages after the last assistant turn are left out.
    """
    turns = list(_turns(messages))
    history = renderer.history(turns[0][0])
    steps: list[Step] = []
    before: list[Message] = []
    for i, (context, turn) in enumerate(turns):
        if i > 0:
            history.extend(steps[-1].response_ids, context)
        before += context
        is_last = i == len(turns) - 1
        response_ids = renderer.turn_ids(before, turn)  # [R]
        step = Step(
            index=i,
            last=is_last,
            prompt_ids=history.prompt_ids,
            response_ids=response_ids,
            loss_mask=np.full(len(response_ids), bool(turn.get("weight", 1))),
            logprobs=None,
            versions=np.array([[0, len(response_ids)]], np.int32),
            reward=reward if is_last else 0.0,
        )
        steps.append(step)
        before.append(turn)
    share_prefixes(steps)
    trajectory = Trajectory(number, 0, steps, StopReason.DONE, metrics or {})
    return Group(number, [trajectory])


def _turns(messages: list[Message]) -> Iterator[tuple[list[Message], Message]]:
    """(messages since the last assistant turn, assistant turn), for each of these turns."""
    context: list[Message] = []
    for message in messages:
        if message["role"] != ASSISTANT:
            context.append(message)
            continue
        yield context, message
        context = []


def _group_of_row(number: int, row: dict[str, Any], renderer: Renderer) -> Group:
    problem = _problem(row)
    if problem is not None:
        raise DataError(problem)
    messages = [_with_parsed_arguments(message) for message in row["messages"]]
    if row.get("tools"):
        with_tools = renderer.with_options(tools=row["tools"])
        prompt, _ = next(_turns(messages))  # a template may show tools in the user's message
        if with_tools.prompt_ids(prompt).tolist() == renderer.prompt_ids(prompt).tolist():
            raise DataError("column tools: the chat template does not show tools")
        renderer = with_tools
    return demonstration(number, messages, renderer)


def _without_nulls(value: Any, depth: int) -> Any:
    """Without the null entries of mappings, in so many levels of mappings."""
    if isinstance(value, dict) and depth:
        kept = {key: part for key, part in value.items() if part is not None}
        return {key: _without_nulls(part, depth - 1) for key, part in kept.items()}
    if isinstance(value, list):
        return [_without_nulls(part, depth) for part in value]
    return value


def _with_parsed_arguments(message: Message) -> Message:
    """OpenAI writes the arguments of a call as JSON text; chat templates expect the object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(arguments)
        calls.append(call | {"function": function})
    return message | {"content": message.get("content", ""), "tool_calls": calls}


def _problem(row: dict[str, Any]) -> str | None:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return "column messages: a list of chat messages is needed"
    for i, message in enumerate(messages):
        problem = _message_problem(message)
        if problem is not None:
            return f"message {i + 1}: {problem}"
    if messages[0]["role"] == ASSISTANT:
        return "message 1: is the assistant's; a prompt must precede it"
    if all(message["role"] != ASSISTANT for message in messages):
        return "column messages: no message is the assistant's, so that nothing is trained"
    if not isinstance(row.get("tools") or [], list):
        return "column tools: a list of JSON schemas is needed"
    return None


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return 'needs the form {"role": "...", "content": "..."}'
    calls = message.get("tool_calls")
    if not isinstance(message.get("content", "" if calls else None), str):
        return "its content is not text"
    if calls and not are_tool_calls(calls):
        return 'tool_calls needs the form [{"function": {"name": "...", "arguments": {...}}}]'
    unknown = set(message) - ASSISTANT_KEYS
    if message["role"] == ASSISTANT and unknown:
        return f"{min(unknown)}: not trained; write it into the content"
    if message.get("weight", 1) not in (0, 1):
        return f"weight = {message['weight']}: must be 0 or 1"
    return None
