"""Every key of `rollout`, `eval`, `data` and `env` takes effect."""

import asyncio
import json
from random import Random

import pytest

from megastep.config import load
from megastep.envs.chase import Chase
from megastep.rollout import blocking
from megastep.rollout.agent import Limits
from megastep.rollout.data import Prompt
from megastep.rollout.task import Task

CHASE = "configs/chase.yaml"
CHASE_ROW = Chase.generate(Random(0))


class Recorder:
    """An engine that records its calls and fails."""

    def __init__(self):
        self.asked = []

    async def __call__(
        self, prompt_ids, sampling, *, session, routing_start=0, routing_version=None
    ):
        self.asked.append((session, sampling))
        raise RuntimeError("no engine here")


def asked(make_pool) -> list:
    """The engine calls of a task's pool for two prompts."""
    engine = Recorder()
    prompts = [Prompt(id, CHASE_ROW) for id in range(2)]
    asyncio.run(make_pool(engine).run(prompts))
    return engine.asked


GIVEN = [
    "rollout.temperature=0.7",
    "rollout.top_p=0.9",
    "rollout.top_k=11",
    "rollout.samples_per_prompt=3",
    "rollout.concurrency=5",
    "rollout.max_turns=4",
    "rollout.max_prompt_tokens=100",
    "rollout.max_response_tokens=7",
    "rollout.env_timeout_s=2.5",
    "eval.temperature=0.3",
    "eval.top_p=0.8",
    "eval.top_k=5",
    "eval.samples_per_prompt=2",
    "eval.prompts=6",
]


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.load(load(CHASE, GIVEN))


def test_each_pool_uses_the_sampling_of_its_section(task):
    """temperature, top_p, top_k and samples_per_prompt of `rollout` and `eval` reach the engine."""
    training = asked(task.pool)
    held_out = asked(task.eval_pool)
    assert len(training) == 2 * 3 and len(held_out) == 2 * 2
    assert {(s.temperature, s.top_p, s.top_k, s.max_tokens) for _, s in training} == {
        (0.7, 0.9, 11, 6)
    }
    assert {(s.temperature, s.top_p, s.top_k, s.max_tokens) for _, s in held_out} == {
        (0.3, 0.8, 5, 6)
    }
    seeds = [sampling.seed for _, sampling in training + held_out]
    assert len(set(seeds)) == len(seeds)


def test_the_seed_of_the_run_is_in_every_call():
    first, again, other = (
        asked(Task.load(load(CHASE, [f"train.seed={seed}"])).pool) for seed in (1, 1, 2)
    )
    assert [s.seed for _, s in first] == [s.seed for _, s in again]
    assert not {s.seed for _, s in first} & {s.seed for _, s in other}


def test_limits_are_those_of_rollout(task):
    for pool in (task.pool(None), task.eval_pool(None)):
        assert pool.agent.limits == Limits(4, 100, 7, 2.5) and pool.concurrency == 5
    assert task.pool(None).samples_per_prompt == 3
    assert task.eval_pool(None).samples_per_prompt == 2
    assert len(task.eval_prompts()) == 6


def test_env_threads_bound_the_blocking_calls(monkeypatch):
    monkeypatch.setattr(blocking.calls, "limit", 1)
    Task.load(load(CHASE, ["rollout.env_threads=7"])).pool(None)
    assert blocking.calls.limit == 7


def test_default_max_prompt_tokens_is_the_context_without_the_response():
    given = [
        "rollout.max_prompt_tokens=null",
        "engine.max_model_len=200",
        "rollout.max_response_tokens=9",
    ]
    assert Task.load(load(CHASE, given)).pool(None).agent.limits.max_prompt_tokens == 191


def test_mode_and_template_reach_the_renderer():
    def history(*given):
        renderer = Task.load(load(CHASE, list(given))).renderer
        made = renderer.history([{"role": "user", "content": "?"}])
        return type(made).__name__, renderer.options

    assert history("rollout.mode=chat", "rollout.template.keep=3") == ("ChatHistory", {"keep": 3})
    assert history("rollout.mode=tokens") == ("TokenHistory", {})


def test_data_keys_select_the_rows(tmp_path):
    """train, eval, held_out and shuffle of a file; env.name selects the environment."""
    for name, count in (("train", 10), ("eval", 4)):
        lines = [json.dumps({"secret": n, "name": name}) + "\n" for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))

    def load_task(*given):
        files = [
            f"data.train={tmp_path}/train.jsonl",
            "env.name=guess",
            "warm_start.trajectories=0",
        ]
        return Task.load(load(CHASE, files + list(given)))

    held_out = load_task("data.held_out=3")
    assert (len(held_out.train_rows), len(held_out.eval_rows)) == (7, 3)
    separate = load_task(f"data.eval={tmp_path}/eval.jsonl", "data.shuffle=false", "eval.prompts=9")
    assert [row["name"] for row in separate.eval_rows] == ["eval"] * 4 and len(
        separate.eval_prompts()
    ) == 4
    assert [prompt.row["secret"] for prompt in separate.stream().take(10)] == list(range(10))
    shuffled = load_task("data.held_out=1", "data.shuffle=true").stream().take(9)
    assert [p.row["secret"] for p in shuffled] != sorted(p.row["secret"] for p in shuffled)
    assert separate.env.__name__ == "Guess"


def test_number_of_generated_rows():
    given = ["data.generated_rows=30", "data.held_out=5", "env.name=guess", "env.options.numbers=9"]
    task = Task.load(load(CHASE, given))
    assert (len(task.train_rows), len(task.eval_rows)) == (25, 5)
    assert task.pool(None).options == {"numbers": 9} == task.eval_pool(None).options


def test_number_of_demonstrations():
    first, second, other = (
        Task.load(load(CHASE, ["warm_start.trajectories=7", f"train.seed={seed}"])).demonstrations()
        for seed in (1, 1, 2)
    )
    texts = [
        [step.response_ids.tolist() for g in groups for t in g.trajectories for step in t.steps]
        for groups in (first, second, other)
    ]
    assert len(first) == 7 and texts[0] == texts[1] != texts[2]
    assert Task.load(load(CHASE, ["warm_start.trajectories=0"])).demonstrations() == []
