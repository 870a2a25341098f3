"""Environments of skyrl-gym run unchanged: SQL on a real database, search on our server."""

import asyncio
import shutil

import numpy as np
import pytest

from megastep.envs import search_data, sql_data
from megastep.envs.retrieval import application, listening, read_corpus
from megastep.envs.skyrl import SkyRL
from megastep.errors import EnvError
from megastep.rollout.env import check_options, find_env

NO_IDS = np.array([], np.int32)
PROMPT = [{"role": "user", "content": "What does the first product cost?"}]


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    """In the folders that skyrl-gym expects."""
    folder = tmp_path_factory.mktemp("skyrl")
    sql_data.write(folder / "ours", databases=2, questions=2, seed=0)
    target = folder / "spider/database/shop"
    target.mkdir(parents=True)
    shutil.copy(folder / "ours/databases/shop_0.sqlite", target / "shop.sqlite")
    return folder


def sql_row(**more):
    gold = {"ground_truth": "SELECT name FROM product WHERE id = 1"}
    return {
        "prompt": PROMPT,
        "env_class": "text2sql",
        "db_id": "shop",
        "data": "spider",
        "reward_spec": gold,
        **more,
    }


async def run_episode(env, *texts):
    messages = await env.start()
    outcomes = [await env.step(text, NO_IDS) for text in texts]
    await env.close()
    return messages, outcomes


def test_s17_the_sql_environment(databases):
    env = SkyRL(sql_row(), config={"db_path": str(databases)}, max_turns=4)
    messages, (looked, malformed, solved) = asyncio.run(
        run_episode(
            env,
            "<think>look</think><sql>SELECT name FROM product WHERE id < 2</sql>",
            "<think>hm</think>",
            "<think>so</think><solution>SELECT name FROM product WHERE id = 1</solution>",
        )
    )
    assert messages == PROMPT
    assert (
        "lamp" in looked.observation[0]["content"]
        and "3 turns left" in looked.observation[0]["content"]
    )
    assert "invalid" in malformed.observation[0]["content"]
    assert solved.done and solved.reward == 1 and solved.observation == []


def test_turn_limit_and_reward_of_the_environment(databases):
    env = SkyRL(sql_row(), config={"db_path": str(databases)}, max_turns=1)
    _, (outcome,) = asyncio.run(run_episode(env, "<think>no</think>"))
    assert outcome.done and outcome.reward == -1  # skyrl-gym's reward without a solution


def test_s17_the_search_environment_on_our_server(tmp_path):
    search_data.write(tmp_path, people=20, questions=2, seed=0)

    async def run():
        app = application(read_corpus(tmp_path / "corpus.jsonl"))
        runner, url = await listening(app, "127.0.0.1", 0)
        config = {"log_requests": False, "search_url": url, "topk": 2, "timeout": 5}
        row = {"prompt": PROMPT, "reward_spec": {"ground_truth": {"target": ["Lamp"]}}}
        try:
            return await run_episode(
                SkyRL(row, env="search", config=config, max_turns=3),
                "<search>city river</search>",
                "<answer>lamp</answer>",
            )
        finally:
            await runner.cleanup()

    _, (searched, answered) = asyncio.run(run())
    shown = searched.observation[0]["content"]
    assert "is a city on the river" in shown and "Doc 2" in shown
    assert answered.done and answered.reward == 1


def test_errors_name_what_is_missing(databases):
    with pytest.raises(EnvError, match="env.options.env: must be given"):
        SkyRL({"prompt": PROMPT})
    with pytest.raises(FileNotFoundError, match="none.sqlite"):
        asyncio.run(SkyRL(sql_row(db_id="none"), config={"db_path": str(databases)}).start())
    env = find_env("skyrl")
    check_options(env, {"env": "text2sql", "config": {}})
    with pytest.raises(
        EnvError, match="env.options.id: SkyRL has no such option; it takes env, config, max_turns"
    ):
        check_options(env, {"id": "text2sql"})
