"""Agent programs on real engines: the steps of an environment, bit for bit."""

import asyncio
from random import Random

import numpy as np

from megastep.envs.chase import Chase
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.calls import ModelCall
from megastep.rollout.data import Prompt
from megastep.rollout.endpoint import Endpoint
from megastep.rollout.generation import Sampling, Session
from megastep.rollout.parsers import Parsers
from megastep.rollout.program import FunctionProgram, ProgramPool
from megastep.rollout.recording import Model, Recording
from megastep.rollout.renderer import Renderer
from megastep.samples.validation import validate
from megastep.types import Group

LIMITS = Limits(max_turns=4, max_prompt_tokens=400, max_response_tokens=9, env_timeout_s=30.0)
GREEDY = Sampling(max_tokens=0, temperature=0.0)
FIELDS = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "routing")


def test_chase_through_the_endpoint_equals_chase_through_env(rollouts):
    rows = [Chase.generate(Random(seed)) for seed in range(4)]
    for mode in ("tokens", "chat"):
        renderer = Renderer.for_model("configs/models/chase", mode)
        generate = rollouts.fleet.generate
        model = Model(
            generate,
            renderer,
            Parsers(renderer.tokenizer, "none", "none"),
            LIMITS,
            GREEDY,
            seed=3,
            vocab=len(renderer.tokenizer),
        )
        program = FunctionProgram("tests.rollout.agents:chase")
        pool = ProgramPool(model, program, Endpoint(), 60.0, 1, 1, label=mode)
        agent = Agent(generate, renderer, LIMITS, GREEDY, seed=3)

        async def both(pool=pool, agent=agent):
            found = []
            for id, row in enumerate(rows):  # one call at a time: batches change the last bit
                by_agent = await pool.run_episode(Prompt(id, row), 0)
                by_env = await agent.run_episode(
                    lambda row=row: Chase(row), id, 0, Session(f"env {pool.label}/{id}", 0)
                )
                found.append((by_agent, by_env))
            return found

        for by_agent, by_env in asyncio.run(both()):
            validate([Group(by_agent.group_id, [by_agent])])
            assert by_env.stop_reason in ("max_turns", "done")
            assert len(by_agent.steps) == len(by_env.steps) > 0
            assert by_agent.reward == by_env.reward
            for one, other in zip(by_agent.steps, by_env.steps):
                assert one.routing_start == other.routing_start
                for name in FIELDS:
                    assert np.array_equal(getattr(one, name), getattr(other, name)), (mode, name)


def test_parameters_of_a_call_reach_the_engine(rollouts):
    """Logit bias forces a token; the step is context."""
    renderer = Renderer.for_model("configs/models/chase", "tokens")
    parsers = Parsers(renderer.tokenizer, "none", "none")
    model = Model(rollouts.fleet.generate, renderer, parsers, LIMITS, GREEDY, 3, vocab=40)
    recording = Recording(model, 0, 0, Session("bias", 0))
    messages = [{"role": "user", "content": "hops 2 from 7"}]
    asyncio.run(recording.answer(ModelCall(messages, extra={"logit_bias": {21: 100.0}})))
    ((_, _, step),) = recording.calls
    assert step.response_ids[:-1].tolist() == [21] * (LIMITS.max_response_tokens - 1)
    assert not step.loss_mask.any() and recording.untrained == {"sampling": 1}
