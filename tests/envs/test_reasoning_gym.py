"""X10: tasks of the reasoning-gym library, as they are."""

import asyncio
from random import Random

import numpy as np
import pytest

from megastep.envs.reasoning_gym import FEEDBACK, ReasoningGym
from megastep.errors import EnvError
from megastep.rollout.env import check_options, find_env

pytest.importorskip("reasoning_gym", reason="launch/requirements-adapters.txt is not installed")

NO_IDS = np.array([], np.int32)
ROW = {"seed": 7}


async def run_episode(env, *texts):
    messages = await env.start()
    outcomes = [await env.step(text, NO_IDS) for text in texts]
    await env.close()
    return messages, outcomes


def answer_of(row: dict, task: str) -> str:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=row["seed"])[0]["answer"]


def test_x10_the_right_answer_ends_with_the_librarys_score():
    right = answer_of(ROW, "chain_sum")
    env = ReasoningGym(ROW, tasks=["chain_sum"])
    text = f"<think>0</think>so <answer>{right}</answer>"
    messages, (outcome,) = asyncio.run(run_episode(env, text))
    assert "+" in messages[0]["content"] or "-" in messages[0]["content"]
    assert (outcome.reward, outcome.done) == (1.0, True)
    assert outcome.metrics == {"success": True, "score": 1.0}


def test_x10_tries_and_feedback():
    """env.options.tries: the reward is the last answer's, given once."""
    right = answer_of(ROW, "chain_sum")
    env = ReasoningGym(ROW, tasks=["chain_sum"], tries=3)
    _, outcomes = asyncio.run(run_episode(env, "<answer>no</answer>", right))
    assert [o.done for o in outcomes] == [False, True]
    assert outcomes[0].observation == [{"role": "user", "content": FEEDBACK}]
    assert [o.reward for o in outcomes] == [0.0, 1.0]


def test_x10_the_last_try_ends_the_episode():
    env = ReasoningGym(ROW, tasks=["chain_sum"], tries=2)
    _, outcomes = asyncio.run(run_episode(env, "no", "no"))
    assert [o.done for o in outcomes] == [False, True]
    assert outcomes[-1].metrics["success"] is False


def test_x10_all_samples_of_a_prompt_get_one_question_and_prompts_several_tasks():
    tasks = ["chain_sum", "leg_counting"]
    rows = [ReasoningGym.generate(Random(i)) for i in range(8)]

    def question(row):
        messages, _ = asyncio.run(run_episode(ReasoningGym(row, tasks=tasks)))
        return messages[0]["content"]

    questions = [question(row) for row in rows]
    assert questions == [question(row) for row in rows]
    assert len(set(questions)) == len(rows)
    assert 0 < sum("legs" in text for text in questions) < len(rows)


def test_x10_settings_of_a_task_reach_the_library():
    config = {"chain_sum": {"min_terms": 9, "max_terms": 9}}
    messages, _ = asyncio.run(run_episode(ReasoningGym(ROW, tasks=["chain_sum"], config=config)))
    question = messages[0]["content"].partition("\n")[0]
    assert sum(question.count(sign) for sign in (" + ", " - ")) == 8


@pytest.mark.parametrize(
    "options, problem",
    [
        (
            {"tasks": ["chain_some"]},
            "chain_some is no data set of reasoning_gym; it has .*chain_sum",
        ),
        ({"tasks": []}, "env.options.tasks = .*: a list of task names is needed"),
        ({"tasks": "chain_sum"}, "env.options.tasks = chain_sum: a list of task names is needed"),
        (
            {"tasks": ["chain_sum"], "config": {"chain_sum": {"wrong": 1}}},
            "env.options.config.chain_sum: .*wrong",
        ),
        (
            {"tasks": ["chain_sum"], "config": {"chain_sum": {"min_terms": -1}}},
            "env.options.config.chain_sum: min_terms must be positive",
        ),
    ],
)
def test_x10_a_mistake_is_named(options, problem):
    with pytest.raises(EnvError, match=problem):
        asyncio.run(run_episode(ReasoningGym(ROW, **options)))


def test_x10_it_is_built_in():
    env = find_env("reasoning_gym")
    with pytest.raises(EnvError, match="env.options.tasks: must be given"):
        check_options(env, {})
