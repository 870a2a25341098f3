"""The quickstart's task: rules, prompt format, model folder, lazy expert; and `guess`."""

import asyncio
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from megastep.envs.chase import Chase, demonstrations, target
from megastep.envs.guess import Guess
from megastep.rollout.renderer import Renderer
from megastep.samples.validation import validate

FOLDER = "configs/models/chase"
ROW = {"table": [3, 0, 1, 2] + list(range(4, 16)), "hops": 2, "key": 0}


def episode(env, *texts):
    async def run():
        await env.start()
        return [await env.step(text, np.array([], np.int32)) for text in texts]

    return asyncio.run(run())


def test_a_right_answer_has_reward_1():
    called, answered = episode(
        Chase(ROW), "<think> 2 0 </think> call 0", "<think> 1 3 </think> answer 2"
    )
    assert (
        called.observation == [{"role": "tool", "content": "3"}]
        and not called.done
        and called.reward == 0
    )
    assert answered.done and answered.reward == 1 and answered.metrics == {"success": True}


def test_a_wrong_answer_has_reward_0():
    (outcome,) = episode(Chase(ROW), "answer 5")
    assert outcome.done and outcome.reward == 0 and outcome.metrics == {"success": False}


@pytest.mark.parametrize(
    "text", ["", "call", "call 16", "call x", "call 1 2", "answer -1", "<think> 2 0 call 0"]
)
def test_a_malformed_turn_returns_error(text):
    (outcome,) = episode(Chase(ROW), text)
    assert outcome.observation == [{"role": "tool", "content": "error"}] and not outcome.done


def test_generated_episodes_follow_from_the_seed():
    rows = [Chase.generate(Random(f"0/{i}")) for i in range(50)]
    assert rows == [Chase.generate(Random(f"0/{i}")) for i in range(50)] and rows[0] != rows[1]
    assert all(sorted(r["table"]) == list(range(16)) for r in rows) and {
        r["hops"] for r in rows
    } == {1, 2, 3}


def test_prompt_format_of_the_quickstart():
    r = Renderer.for_model(FOLDER, "chat")
    history = r.history(asyncio.run(Chase({**ROW, "hops": 2, "key": 7}).start()))
    assert r.tokenizer.decode(history.prompt_ids) == "<bos> <user> hops 2 from 7 <eot> <asst>"
    response = r.tokenizer.encode("<think> 2 7 </think> call 7 <eot>", add_special_tokens=False)
    assert (
        len(response) == 7
        and len(history.prompt_ids) == 8
        and r.tokenizer.unk_token_id not in response
    )
    history.extend(np.array(response, np.int32), [{"role": "tool", "content": "12"}])
    assert r.tokenizer.decode(history.prompt_ids) == (
        "<bos> <user> hops 2 from 7 <eot> <asst> call 7 <eot> <tool> 12 <eot> <asst>"
    )


def test_the_lazy_expert():
    r = Renderer.for_model(FOLDER, "chat")
    groups = demonstrations(600, seed=1, renderer=r)
    validate(groups)
    assert [g.id for g in groups] == list(range(600))
    steps = [s for g in groups for t in g.trajectories for s in t.steps]
    assert all(s.logprobs is None and s.loss_mask.all() and len(s.response_ids) == 7 for s in steps)
    texts = [r.text(s.response_ids) for s in steps]
    with_hops = [text for text in texts if not text.startswith("<think> 0")]
    calls = sum("call" in text for text in with_hops)
    assert calls / len(with_hops) == pytest.approx(0.4, abs=0.05)
    assert np.mean([g.trajectories[0].reward for g in groups]) == pytest.approx(0.28, abs=0.06)
    again = demonstrations(3, seed=1, renderer=r)[2].trajectories[0].steps[0]
    assert again.response_ids.tolist() == groups[2].trajectories[0].steps[0].response_ids.tolist()


def test_demonstrations_follow_the_rules_of_the_environment():
    """Their responses earn the recorded rewards in the environment."""
    r = Renderer.for_model(FOLDER, "chat")
    for number, group in enumerate(demonstrations(60, seed=5, renderer=r)):
        row = Chase.generate(Random(f"chase/5/{number}"))
        outcomes = episode(
            Chase(row), *[r.text(s.response_ids) for s in group.trajectories[0].steps]
        )
        assert [o.reward for o in outcomes] == [s.reward for s in group.trajectories[0].steps]
        assert outcomes[-1].done and not any(o.done for o in outcomes[:-1])


def test_target():
    assert [target(ROW["table"], hops, 0) for hops in range(5)] == [0, 3, 2, 1, 0]


def test_make_models_writes_the_shipped_model_folders(tmp_path):
    from tools.make_models import MODELS, write

    for name in MODELS:
        write(name, tmp_path / name)
        shipped = Path("configs/models") / name
        assert {p.name for p in shipped.iterdir()} == {p.name for p in (tmp_path / name).iterdir()}
        for path in shipped.iterdir():
            assert path.read_text() == (tmp_path / name / path.name).read_text(), path
    assert len(json.loads((tmp_path / "chase/tokenizer.json").read_text())["model"]["vocab"]) == 64


def test_guess():
    env = Guess({"secret": 5})
    low, high, bad, right = episode(env, "guess 3", "<think> 4 15 </think> guess 9", "5", "guess 5")
    assert [o.observation[0]["content"] for o in (low, high, bad)] == ["higher", "lower", "error"]
    assert right.done and right.reward == 1
    # The state is the remaining interval, independent of the history.
    assert episode(Guess({"secret": 5}), "guess 9", "guess 3")[1].state == high.state != low.state
    assert 0 <= Guess.generate(Random(0))["secret"] < 16


def test_guess_has_only_words_of_the_tokenizer():
    r = Renderer.for_model(FOLDER, "tokens")
    ids = r.prompt_ids(asyncio.run(Guess({"secret": 5}).start()))
    assert r.tokenizer.unk_token_id not in ids.tolist()
