"""Agent programs for tests, and a pool of one of them over a scripted engine."""

import asyncio
import contextlib
from dataclasses import replace

import openai

from megastep.rollout.agent import Limits
from megastep.rollout.data import Prompt
from megastep.rollout.endpoint import Endpoint
from megastep.rollout.env import Outcome
from megastep.rollout.generation import Sampling
from megastep.rollout.parsers import Parsers
from megastep.rollout.program import Program, ProgramPool
from megastep.rollout.recording import Model
from megastep.rollout.renderer import Renderer
from megastep.samples.validation import validate
from megastep.types import Group

from . import chats

LIMITS = Limits(max_turns=20, max_prompt_tokens=2000, max_response_tokens=40, env_timeout_s=5.0)
SAMPLING = Sampling(max_tokens=0)


class Function(Program):
    """An async function that runs in the event loop of the endpoint."""

    def __init__(self, function):
        self.function = function

    async def run(self, task, llm):
        return await self.function(task, llm)


def make_pool(
    program,
    replies=("ab<|im_end|>",),
    kind="qwen3",
    mode="tokens",
    routing=False,
    limits=LIMITS,
    parsers=("none", "none"),
    timeout_s=20.0,
    **model,
):
    renderer = Renderer(chats.tokenizer(kind), mode)
    script = chats.ScriptedEngine(renderer, list(replies), routing)
    answering = Model(
        script,
        renderer,
        Parsers(renderer.tokenizer, *parsers),
        limits,
        SAMPLING,
        seed=7,
        vocab=len(renderer.tokenizer),
    )
    if not isinstance(program, Program):
        program = Function(program)
    pool = ProgramPool(
        replace(answering, **model), program, Endpoint(), timeout_s, 1, 8, label="test"
    )
    return pool, script, renderer


def run_agent(program, *replies, task=None, **settings):
    """The trajectory of one episode, validated, and its engine and renderer."""
    if replies:
        settings["replies"] = replies
    pool, script, renderer = make_pool(program, **settings)
    trajectory = asyncio.run(pool.run_episode(Prompt(4, task or {}), 2))
    validate([Group(4, [trajectory])])
    return trajectory, script, renderer


@contextlib.asynccontextmanager
async def openai_client(llm):
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        yield client


def user(text):
    return {"role": "user", "content": text}


# ---------------------------------------------------------------- chase as an agent


async def chase(task, llm):
    """The environment `chase`, as a program that calls the model itself."""
    from megastep.envs.chase import Chase

    env = Chase(task)
    messages = await env.start()
    reward, metrics = 0.0, {}
    async with openai_client(llm) as client:
        while True:
            try:
                response = await client.chat.completions.create(model="policy", messages=messages)
            except openai.APIStatusError as error:
                if error.status_code == 429:  # rollout.max_turns
                    return Outcome(reward=reward, metrics=metrics)
                raise
            text = response.choices[0].message.content
            outcome = await env.step(text, None)
            reward += outcome.reward
            metrics |= outcome.metrics
            if outcome.done:
                return Outcome(reward=reward, metrics=metrics)
            messages += [{"role": "assistant", "content": text}, *outcome.observation]


def generate(random):
    """Rows of `data.train: generated`."""
    from megastep.envs.chase import Chase

    return Chase.generate(random)
