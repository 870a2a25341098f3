"""Tool calls and reasoning of agents, through vLLM's parsers."""

import json

import anthropic
import numpy as np
import pytest

from megastep.errors import ConfigError
from megastep.rollout.agent import Limits
from megastep.rollout.parsers import Parsers

from . import chats
from .agents import openai_client, run_agent, user
from .test_endpoint import _in_threads

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
LOOK = 'so <tool_call>\n{"name": "look", "arguments": {"key": "ab"}}\n</tool_call><|im_end|>'
LONG = Limits(max_turns=20, max_prompt_tokens=2000, max_response_tokens=200, env_timeout_s=5.0)
TOOLS = dict(kind="hermes", parsers=("auto", "auto"), limits=LONG)


@pytest.mark.parametrize("mode", ["tokens", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_tool_calls(mode, stream):
    async def call(task, llm):
        async with openai_client(llm) as client:
            messages = [user("ab?")]
            given = dict(model=llm.model, tools=[TOOL], stream=stream)
            response = await client.chat.completions.create(messages=messages, **given)
            if stream:
                deltas = [c.choices[0].delta async for c in response if c.choices]
                content = "".join(delta.content or "" for delta in deltas)
                calls = [call for delta in deltas for call in delta.tool_calls or []]
            else:
                content = response.choices[0].message.content
                calls = response.choices[0].message.tool_calls
                assert response.choices[0].finish_reason == "tool_calls"
            (made,) = calls
            assert content == "so " and made.function.name == "look"
            assert json.loads(made.function.arguments) == {"key": "ab"}
            function = {"name": "look", "arguments": made.function.arguments}
            messages += [
                {
                    "role": "assistant",
                    "content": content,
                    "tool_calls": [{"id": made.id, "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": made.id, "content": "found <|im_end|>"},
            ]
            await client.chat.completions.create(messages=messages, **given)
        return 1.0

    trajectory, _, renderer = run_agent(call, LOOK, mode=mode, **TOOLS)
    assert trajectory.stop_reason == "done", trajectory.env_metrics
    one, two = trajectory.steps
    first = renderer.tokenizer.decode(one.prompt_ids)
    assert first.startswith("<|im_start|>system\n[") and "Look something up." in first
    second = renderer.tokenizer.decode(two.prompt_ids)
    assert second.endswith("<|im_start|>tool\nfound <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert two.prompt_ids.tolist().count(end) == 4  # system, user, assistant, tool
    if mode == "tokens":
        sequence = np.concatenate([one.prompt_ids, one.response_ids])
        assert two.prompt_ids[: len(sequence)].tolist() == sequence.tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_use(stream):
    def call(task, llm):
        client = anthropic.Anthropic(base_url=llm.anthropic_base_url, api_key=llm.api_key)
        schema = {"name": "look", "input_schema": TOOL["function"]["parameters"]}
        given = dict(model="any", max_tokens=100, tools=[schema])
        messages = [user("ab?")]
        if stream:
            with client.messages.stream(messages=messages, **given) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(messages=messages, **given)
        assert message.stop_reason == "tool_use"
        text, use = message.content
        assert text.text == "so " and (use.name, use.input) == ("look", {"key": "ab"})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "found"}
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        client.messages.create(messages=messages, **given)
        return 1.0

    program = _in_threads(call)
    trajectory, _, renderer = run_agent(program, LOOK, **TOOLS)
    assert trajectory.stop_reason == "done", trajectory.env_metrics
    one, two = trajectory.steps
    sequence = np.concatenate([one.prompt_ids, one.response_ids])
    assert two.prompt_ids[: len(sequence)].tolist() == sequence.tolist()
    assert renderer.tokenizer.decode(two.prompt_ids).endswith(
        "<|im_start|>tool\nfound<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_forced_tool_call_is_served_and_not_trained():
    async def call(task, llm):
        async with openai_client(llm) as client:
            choice = {"type": "function", "function": {"name": "look"}}
            response = await client.chat.completions.create(
                model=llm.model, messages=[user("ab?")], tools=[TOOL], tool_choice=choice
            )
            (made,) = response.choices[0].message.tool_calls
            assert json.loads(made.function.arguments) == {"key": "b"}
        return 1.0

    reply = '", "arguments": {"key": "b"}}</tool_call><|im_end|>'
    trajectory, _, renderer = run_agent(call, reply, **TOOLS)
    assert trajectory.stop_reason == "done", trajectory.env_metrics
    (step,) = trajectory.steps
    assert renderer.tokenizer.decode(step.prompt_ids).endswith('<tool_call>{"name": "look')
    assert not step.loss_mask.any() and trajectory.env_metrics["untrained"] == {"forced_tool": 1}


@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_reasoning_is_apart_and_kept_in_the_history(mode):
    reply = "<think>\nall hell\n</think>\n\nab<|im_end|>"

    async def call(task, llm):
        async with openai_client(llm) as client:
            messages = [user("ab?")]
            response = await client.chat.completions.create(model=llm.model, messages=messages)
            message = response.choices[0].message
            assert message.reasoning_content.strip() == "all hell"
            assert message.content.strip() == "ab"
            messages += [{"role": "assistant", "content": message.content}]
            messages += [{"role": "tool", "content": "x", "tool_call_id": "1"}]
            await client.chat.completions.create(model=llm.model, messages=messages)
        return 1.0

    trajectory, _, renderer = run_agent(call, reply, mode=mode, parsers=("auto", "auto"))
    assert trajectory.stop_reason == "done", trajectory.env_metrics
    # The template keeps the thinking of the current turn, whose text the client did not repeat.
    assert "all hell" in renderer.tokenizer.decode(trajectory.steps[1].prompt_ids)


def test_parsers_are_chosen_by_the_template_and_checked():
    found = {
        kind: (parsers.tool_parser, parsers.reasoning_parser)
        for kind in ("qwen3", "hermes", "gpt_oss", "llama3", "deepseek")
        for parsers in [Parsers(chats.tokenizer(kind))]
    }
    assert found == {
        "qwen3": (None, "qwen3"),
        "hermes": ("hermes", None),
        "gpt_oss": ("openai", "openai_gptoss"),
        "llama3": (None, None),
        "deepseek": (None, "qwen3"),
    }
    Parsers(chats.tokenizer("qwen3"), "hermes", "deepseek_r1").check()
    with pytest.raises(ConfigError, match="agent.tool_parser = hermit: vLLM has no such parser"):
        Parsers(chats.tokenizer("qwen3"), "hermit", "none").check()


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_an_agent_framework_runs_unchanged(kind):
    """openai-agents: its loop, its tools, its streaming."""
    import agents as framework
    from openai import AsyncOpenAI

    framework.set_tracing_disabled(True)
    looked_up = []

    @framework.function_tool
    def look(key: str) -> str:
        """Look something up."""
        looked_up.append(key)
        return f"found {key}"

    async def call(task, llm):
        client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
        model = getattr(framework, kind)(llm.model, client)
        agent = framework.Agent(name="seeker", instructions="Seek.", model=model, tools=[look])
        result = await framework.Runner.run(agent, "ab?")
        streamed = framework.Runner.run_streamed(agent, "again?")
        async for _ in streamed.stream_events():
            pass
        assert result.final_output == streamed.final_output == "at last"
        return 1.0

    replies = [LOOK, "at last<|im_end|>"] * 2
    trajectory, _, renderer = run_agent(call, *replies, **TOOLS)
    assert trajectory.stop_reason == "done", trajectory.env_metrics
    assert looked_up == ["ab", "ab"] and len(trajectory.steps) == 4
    assert all(step.loss_mask.all() for step in trajectory.steps)
    one, two = trajectory.steps[:2]
    sequence = np.concatenate([one.prompt_ids, one.response_ids])
    assert two.prompt_ids[: len(sequence)].tolist() == sequence.tolist()
    assert "found ab" in renderer.tokenizer.decode(two.prompt_ids)
