"""Agent programs through the endpoint, with the real SDKs and a scripted engine."""

import asyncio
import functools
import re
import sys
import time
from pathlib import Path

import anthropic
import numpy as np
import openai
import pytest

from megastep.envs.chase import Chase
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.commands import Command
from megastep.rollout.env import Outcome
from megastep.rollout.generation import Session
from megastep.rollout.program import CommandProgram, FunctionProgram
from megastep.rollout.renderer import Renderer
from megastep.samples.metrics import rollout_metrics
from megastep.types import Group

from . import agents, chats
from .agents import LIMITS, SAMPLING, openai_client, run_agent, user

THINKING = "<think>\nall hell\n</think>\n\nab<|im_end|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
LOOK = 'so <tool_call>\n{"name": "look", "arguments": {"key": "ab"}}\n</tool_call><|im_end|>'
# "ab" as two tokens, which the tokenizer itself would encode as one.
TWO_TOKENS = [
    *(chats.ids("qwen3", letter)[0] for letter in "ab"),
    *chats.ids("qwen3", "<|im_end|>"),
]


def text_of(step, renderer):
    return renderer.tokenizer.decode(step.prompt_ids)


# ---------------------------------------------------------------- recording


async def talk(task, llm):
    """Three turns, each repeating what the model answered."""
    async with openai_client(llm) as client:
        messages = [user("ab?")]
        for text in ("one", "two", None):
            response = await client.chat.completions.create(model=llm.model, messages=messages)
            messages.append(response.choices[0].message.model_dump())
            if text:
                messages.append(user(text))
    return 1.0


def test_every_call_is_a_step_and_sampled_turns_keep_their_tokens():
    trajectory, script, renderer = run_agent(talk, TWO_TOKENS, routing=True)
    assert trajectory.stop_reason == "done" and trajectory.env_metrics == {}
    assert (trajectory.group_id, trajectory.index) == (4, 2)
    assert [s.reward for s in trajectory.steps] == [0.0, 0.0, 1.0]
    assert len(trajectory.steps) == len(script.calls) == 3
    for before, step in zip(trajectory.steps, trajectory.steps[1:]):
        sequence = np.concatenate([before.prompt_ids, before.response_ids])
        assert step.prompt_ids[: len(sequence)].tolist() == sequence.tolist()
        assert step.routing_start == len(sequence) - 1
    for step, (prompt, _, session, _) in zip(trajectory.steps, script.calls):
        assert step.prompt_ids.tolist() == prompt.tolist()
        assert step.response_ids.tolist() == TWO_TOKENS and step.loss_mask.all()
        assert step.logprobs.tolist() == [-1, -2, -3] and step.versions.tolist() == [[3, 3]]
        assert session == Session("test/4", 2)
    turns = [("user", "ab?"), ("assistant", "ab"), ("user", "one"), ("assistant", "ab")]
    turns += [("user", "two")]
    whole = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert text_of(trajectory.steps[2], renderer) == whole + "<|im_start|>assistant\n"


@pytest.mark.parametrize("mode", ["tokens", "chat"])
@pytest.mark.parametrize("kind", ["qwen3", "llama3", "deepseek"])
def test_an_agent_and_an_environment_record_the_same_steps(mode, kind):
    """chase through the endpoint and through Env: equal in every field."""
    end = chats.EOS[kind]
    replies = [f"<think> 2 7 </think> call 7{end}", f"nonsense{end}", f"answer 3{end}"]
    row = {"table": list(range(1, 16)) + [0], "hops": 2, "key": 7}
    settings = dict(kind=kind, mode=mode, routing=True)
    by_agent, script, _ = run_agent(agents.chase, *replies, task=row, **settings)
    renderer = Renderer(chats.tokenizer(kind), mode)
    engine = chats.ScriptedEngine(renderer, replies, routing=True)
    agent = Agent(engine, renderer, LIMITS, SAMPLING, seed=7)
    by_env = asyncio.run(agent.run_episode(lambda: Chase(row), 4, 2, Session("test/4", 2)))
    assert by_agent.stop_reason == by_env.stop_reason == "done"
    assert by_agent.env_metrics == by_env.env_metrics == {"success": False}
    assert by_agent.sampling == by_env.sampling is not None
    assert len(by_agent.steps) == len(by_env.steps) == 3
    for one, other in zip(by_agent.steps, by_env.steps):
        assert (one.index, one.last, one.reward, one.finish) == (
            other.index,
            other.last,
            other.reward,
            other.finish,
        )
        assert one.routing_start == other.routing_start
        for name in ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "routing"):
            ours, theirs = getattr(one, name), getattr(other, name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name
    assert [call[1] for call in script.calls] == [call[1] for call in engine.calls]  # seeds too


def test_parallel_sub_agents_and_a_compacted_history_are_branches():
    async def work(task, llm):
        async with openai_client(llm) as client:

            async def ask(messages, role):
                response = await client.chat.completions.create(
                    model=f"policy:{role}", messages=messages
                )
                return [*messages, response.choices[0].message.model_dump()]

            plan = await ask([user("plan")], "planner")
            one, two = await asyncio.gather(
                ask([*plan, user("first")], "worker"), ask([*plan, user("second")], "worker")
            )
            one = await ask([*one, user("more")], "worker")
            await ask([user("in short: " + two[-1]["content"]), user("what now?")], "planner")
            await ask([*plan, user("done?")], "planner")
        return 1.0

    trajectory, _, renderer = run_agent(work, TWO_TOKENS, routing=True)
    steps = trajectory.steps
    assert [s.index for s in steps] == list(range(6)) and steps[-1].last
    plan = np.concatenate([steps[0].prompt_ids, steps[0].response_ids])
    for step in (steps[1], steps[2], steps[5]):  # each continues the first call
        assert step.prompt_ids[: len(plan)].tolist() == plan.tolist()
        assert step.routing_start >= len(plan) - 1
    first = next(s for s in steps[1:3] if "first" in text_of(s, renderer))
    sequence = np.concatenate([first.prompt_ids, first.response_ids])
    assert steps[3].prompt_ids[: len(sequence)].tolist() == sequence.tolist()
    assert steps[3].routing_start == len(sequence) - 1
    assert 0 < steps[4].routing_start < len(steps[0].prompt_ids)  # shares the first tokens only
    roles = trajectory.env_metrics["roles"]
    assert roles == ["planner", "worker", "worker", "worker", "planner", "planner"]
    metrics = rollout_metrics([Group(4, [trajectory])])
    assert metrics["turn/role_planner"] == metrics["turn/role_worker"] == 0.5


def test_text_of_tools_cannot_write_control_tokens():
    async def inject(task, llm):
        async with openai_client(llm) as client:
            text = "so <|im_end|> it is"
            messages = [
                {"role": "system", "content": text},
                {"role": "user", "content": [{"type": "text", "text": text}]},
                {"role": "assistant", "content": text},
                {"role": "tool", "content": text, "tool_call_id": "1"},
            ]
            await client.chat.completions.create(model=llm.model, messages=messages)
        return 0

    trajectory, _, renderer = run_agent(inject)
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    (step,) = trajectory.steps
    assert text_of(step, renderer).count("so <|im_end|> it is") == 4
    assert step.prompt_ids.tolist().count(end) == 4  # one per message, the template's own


# ---------------------------------------------------------------- what is not trained


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"temperature": 1.0, "top_p": 1.0}, None),  # the run's
        ({"seed": 5, "max_tokens": 9, "presence_penalty": 0}, None),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"extra_body": {"top_k": 3}}, "top_k"),
        ({"logit_bias": {"3": 5}}, "sampling"),
        ({"frequency_penalty": 0.5}, "sampling"),
        ({"model": "policy:judge"}, "role"),
        ({"model": "policy:judge", "extra_headers": {"X-Megastep-Role": "actor"}}, None),
    ],
)
def test_calls_that_cannot_be_trained_are_context(given, reason):
    async def call(task, llm):
        async with openai_client(llm) as client:
            model = given.get("model", "policy:actor")
            rest = {key: value for key, value in given.items() if key != "model"}
            await client.chat.completions.create(model=model, messages=[user("ab?")], **rest)
        return 1.0

    trajectory, script, _ = run_agent(call, roles=("actor",))
    (step,) = trajectory.steps
    assert step.loss_mask.all() == (reason is None) and step.loss_mask.any() == (reason is None)
    assert trajectory.env_metrics.get("untrained", {}) == ({reason: 1} if reason else {})
    (_, sampling, _, _) = script.calls[0]
    for name in ("temperature", "top_p", "seed"):
        assert getattr(sampling, name) == given.get(name, getattr(sampling, name))
    assert sampling.max_tokens == given.get("max_tokens", LIMITS.max_response_tokens - 1)
    assert sampling.top_k == given.get("extra_body", {}).get("top_k", 0)
    extra = {key: given[key] for key in ("frequency_penalty",) if key in given}
    extra |= {"logit_bias": {3: 5.0}} if "logit_bias" in given else {}
    assert sampling.extra == extra
    metrics = rollout_metrics([Group(4, [trajectory])])
    assert metrics.get(f"turn/untrained_{reason}") == (1.0 if reason else None)


def test_a_stop_text_ends_the_response_at_its_token():
    async def call(task, llm):
        async with openai_client(llm) as client:
            response = await client.chat.completions.create(
                model=llm.model, messages=[user("?")], stop=["STOP"], logprobs=True
            )
            choice = response.choices[0]
            assert (choice.message.content, choice.finish_reason) == ("xyz", "stop")
            assert "".join(part.token for part in choice.logprobs.content) == "xyzSTOP"
            return -choice.logprobs.content[-1].logprob

    trajectory, _, renderer = run_agent(call, "xyzSTOPmore text<|im_end|>", routing=True)
    (step,) = trajectory.steps
    assert renderer.tokenizer.decode(step.response_ids) == "xyzSTOP<|im_end|>"
    assert step.loss_mask.tolist() == [True] * 7 + [False]
    assert step.routing_end == step.prompt_tokens + 6
    assert trajectory.reward == 7


# ---------------------------------------------------------------- SDKs


def test_openai_streaming_choices_usage_and_completions():
    async def call(task, llm):
        async with openai_client(llm) as client:
            stream = await client.chat.completions.create(
                model=llm.model,
                messages=[user("?")],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "ab" and chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage.completion_tokens == 2
            several = await client.chat.completions.create(
                model=llm.model, messages=[user("?")], n=3
            )
            assert [c.index for c in several.choices] == [0, 1, 2]
            assert [m.id async for m in client.models.list()] == ["policy"]
            plain = await client.completions.create(model=llm.model, prompt="ab<|im_end|>")
            assert plain.choices[0].text == "ab"
            ids = plain.choices[0].token_ids
            more = await client.completions.create(model=llm.model, prompt=[*ids, 1, 2], logprobs=0)
            assert more.choices[0].logprobs.token_logprobs == [-1, -2]
            again = await client.completions.create(
                model=llm.model, prompt="ab<|im_end|>ab<|im_end|>go"
            )
            return Outcome(reward=0.5, step_rewards={f"{several.id}/2": 2.0, again.id: 1.0})

    trajectory, _, renderer = run_agent(call)
    assert [s.reward for s in trajectory.steps] == [0, 0, 0, 2.0, 0, 0, 1.5]
    first, by_ids, again = trajectory.steps[4:]
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert first.prompt_ids[-1] == end  # of the agent's own text
    assert by_ids.prompt_ids.tolist()[-2:] == [1, 2]
    sequence = [*first.prompt_ids, *first.response_ids]
    assert again.prompt_ids[: len(sequence)].tolist() == sequence


def test_anthropic_sync_and_streaming():
    def call(task, llm):
        client = anthropic.Anthropic(base_url=llm.anthropic_base_url, api_key=llm.api_key)
        first = client.messages.create(
            model="any", max_tokens=20, system="be good", messages=[user("?")]
        )
        assert first.content[0].text == "ab" and first.stop_reason == "end_turn"
        messages = [user("?"), {"role": "assistant", "content": first.content}, user("more")]
        with client.messages.stream(
            model="any",
            max_tokens=20,
            system=[{"type": "text", "text": "be good"}],
            messages=messages,
        ) as stream:
            assert "".join(stream.text_stream) == "ab"
            assert stream.get_final_message().usage.output_tokens == 3
        counted = client.messages.count_tokens(model="any", messages=messages)
        assert counted.input_tokens > 10
        return Outcome(reward=1.0, step_rewards={first.id: 0.25})

    trajectory, _, _ = run_agent(_in_threads(call), TWO_TOKENS)
    one, two = trajectory.steps
    sequence = np.concatenate([one.prompt_ids, one.response_ids])
    assert two.prompt_ids[: len(sequence)].tolist() == sequence.tolist()
    assert [s.reward for s in trajectory.steps] == [0.25, 1.0]


def _in_threads(function):
    """A program of a plain function."""
    program = FunctionProgram.__new__(FunctionProgram)
    program.function = function
    return program


@pytest.mark.parametrize("kind", ["async", "plain", "partial"])
def test_a_function_that_blocks_does_not_block_its_own_calls(kind):
    def call(task, llm):
        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
        client.chat.completions.create(model=llm.model, messages=[user("?")])
        return 1.0

    async def blocking_call(task, llm):
        return call(task, llm)

    kinds = {
        "async": blocking_call,
        "plain": call,
        "partial": functools.partial(functools.partial(blocking_call)),
    }
    trajectory, _, _ = run_agent(_in_threads(kinds[kind]))
    assert trajectory.reward == 1.0


# ---------------------------------------------------------------- limits and failures


def failing(error):
    async def call(task, llm):
        async with openai_client(llm) as client:
            await client.chat.completions.create(model=llm.model, messages=[user("?")])
            raise error

    return call


async def flood(task, llm):
    async with openai_client(llm) as client:
        for _ in range(100):
            await client.chat.completions.create(model=llm.model, messages=[user("?")])


async def grow(task, llm):
    async with openai_client(llm) as client:
        for n in range(100):
            text = "x" * 300 * n
            await client.chat.completions.create(model=llm.model, messages=[user(text)])


async def hang(task, llm):
    async with openai_client(llm) as client:
        await client.chat.completions.create(model=llm.model, messages=[user("?")])
        await asyncio.sleep(60)


async def no_call(task, llm):
    return 1.0


FEW = Limits(max_turns=3, max_prompt_tokens=500, max_response_tokens=40, env_timeout_s=5.0)


@pytest.mark.parametrize(
    ("program", "stop_reason", "steps", "finish", "error"),
    [
        (failing(ValueError("broken")), "env_error", 1, "error", "ValueError: broken"),
        (failing(SystemExit(3)), "env_error", 1, "error", "SystemExit: 3"),
        (flood, "max_turns", 3, "stop", "rollout.max_turns = 3"),
        (grow, "context", 2, "context", "context length exceeded"),
        (hang, "env_timeout", 1, "error", "no result within agent.timeout_s = 2"),
        (no_call, "env_error", 0, None, "made no call"),
    ],
    ids=["raise", "exit", "flood", "grow", "hang", "no_call"],
)
def test_a_failing_agent_is_a_marked_trajectory(program, stop_reason, steps, finish, error):
    program = _in_threads(program)
    begin_s = time.monotonic()
    trajectory, _, _ = run_agent(program, limits=FEW, timeout_s=2.0)
    assert time.monotonic() - begin_s < 20
    assert (trajectory.stop_reason, len(trajectory.steps)) == (stop_reason, steps)
    assert error in trajectory.env_metrics["error"] and trajectory.reward == 0
    if steps:
        assert trajectory.steps[-1].finish == finish


def test_tokens_per_episode():
    trajectory, script, _ = run_agent(flood, "abcdefgh<|im_end|>", max_tokens=12)
    assert trajectory.stop_reason == "max_turns" and len(trajectory.steps) == 2
    assert [sampling.max_tokens for _, sampling, _, _ in script.calls] == [12, 4]
    assert "agent.max_tokens = 12" in trajectory.env_metrics["error"]


def test_choices_of_a_call_that_fails_are_context():
    """One of two choices is sampled, the other fails: the agent gets an error, and tries again."""

    async def call(task, llm):
        async with openai_client(llm) as client:
            given = dict(model=llm.model, messages=[user("?")])
            with pytest.raises(openai.InternalServerError, match="no engine"):
                await client.chat.completions.create(n=2, **given)
            await client.chat.completions.create(**given)
        return 1.0

    replies = ("ab<|im_end|>", RuntimeError("no engine"), "ab<|im_end|>")
    trajectory, _, _ = run_agent(call, *replies)
    assert trajectory.stop_reason == "done", trajectory.env_metrics
    assert [s.loss_mask.any() for s in trajectory.steps] == [False, True]
    assert trajectory.env_metrics == {"untrained": {"aborted": 1}}


def test_a_rejected_request_is_no_call():
    """Prompts that are too long do not count against rollout.max_turns."""

    async def call(task, llm):
        async with openai_client(llm) as client:
            for _ in range(5):
                with pytest.raises(openai.BadRequestError, match="context length exceeded"):
                    await client.chat.completions.create(
                        model=llm.model, messages=[user("x" * 900)]
                    )
            for _ in range(3):
                await client.chat.completions.create(model=llm.model, messages=[user("?")])
        return 1.0

    trajectory, _, _ = run_agent(call, limits=FEW)
    assert trajectory.stop_reason == "done" and len(trajectory.steps) == 3


def test_an_engine_failure_is_the_engines():
    trajectory, _, _ = run_agent(flood, "ab<|im_end|>", RuntimeError("no engine"))
    assert trajectory.stop_reason == "engine_error" and len(trajectory.steps) == 1
    assert "no engine" in trajectory.env_metrics["error"]


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (None, "the reward None"),
        (float("nan"), "the reward nan"),
        ("0.5", "the reward '0.5'"),
        (Outcome(reward=1, metrics={"x": object()}), "the metrics"),
        (Outcome(reward=1, step_rewards={"nobody": 1.0}), "no call has this id"),
        (Outcome(reward=1, step_rewards=[1.0]), "step_rewards"),
    ],
)
def test_an_invalid_result_is_an_error_of_the_agent(returned, error):
    async def call(task, llm):
        async with openai_client(llm) as client:
            await client.chat.completions.create(model=llm.model, messages=[user("?")])
        return returned

    trajectory, _, _ = run_agent(call)
    assert trajectory.stop_reason == "env_error" and error in trajectory.env_metrics["error"]


# ---------------------------------------------------------------- commands


def command(code, **environment):
    return CommandProgram(Command((sys.executable, "-c", code), tuple(environment)))


CALLING = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": task["question"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
"""


def test_a_command_gets_its_task_and_a_clean_environment(monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", "hidden value")
    monkeypatch.setenv("AGENT_SETTING", "given value")
    code = (
        CALLING
        + """
print("chatter")
names = {"keys": sorted(os.environ), "given": os.environ["AGENT_SETTING"]}
print(json.dumps({"reward": 0.7, "metrics": names, "step_rewards": {answer["id"]: 1}}))
"""
    )
    program = command(code, AGENT_SETTING=None)
    trajectory, _, renderer = run_agent(program, task={"question": "ab?"})
    assert trajectory.stop_reason == "done", trajectory.env_metrics
    assert trajectory.reward == 1.7 and "ab?" in text_of(trajectory.steps[0], renderer)
    assert "TRAINER_SECRET" not in trajectory.env_metrics["keys"]
    assert "OPENAI_BASE_URL" in trajectory.env_metrics["keys"]
    assert trajectory.env_metrics["given"] == "***"  # a value from agent.environment is hidden


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (CALLING + "sys.exit('the end of it')", "status 1; the end of its stderr: the end of it"),
        (CALLING + "os.kill(os.getpid(), 9)", "ended by signal 9"),
        (CALLING + "print('no result')", "'no result'"),
        (CALLING + "print(json.dumps({'reward': 1, 'rewrd': 2}))", "unknown key 'rewrd'"),
        (CALLING + "print(json.dumps({'reward': 'much'}))", "the reward 'much'"),
        (CALLING + "sys.stdout.write('x' * 5_000_000)", "the last line"),
    ],
)
def test_a_failing_command_is_a_marked_trajectory(code, error):
    trajectory, _, _ = run_agent(command(code), task={"question": "ab?"})
    assert trajectory.stop_reason == "env_error" and error in trajectory.env_metrics["error"]
    assert len(trajectory.steps) == 1 and trajectory.steps[0].finish == "error"


def test_a_missing_command_is_an_error():
    trajectory, _, _ = run_agent(CommandProgram(Command(("/no/such/program",))))
    assert trajectory.stop_reason == "env_error"
    assert re.search("status 127;.*/no/such/program.*not found", trajectory.env_metrics["error"])


@pytest.mark.parametrize(("reply", "reward"), [("4<|im_end|>", 1.0), ("5<|im_end|>", 0.0)])
def test_examples_of_the_page(reply, reward):
    """docs/agents.md"""
    page = Path("docs/agents.md").read_text()
    (script,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    trajectory, _, _ = run_agent(CommandProgram(Command(("sh", "-c", script))), reply)
    assert (trajectory.stop_reason, trajectory.reward) == ("done", reward)
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(source, names)
    task = {"question": "What is 2 + 2?", "answer": "4"}
    trajectory, _, _ = run_agent(_in_threads(names["solve"]), reply, task=task)
    assert (trajectory.stop_reason, trajectory.reward) == ("done", reward)
