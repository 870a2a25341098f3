"""S5 to S10 and S17: `megastep rollout` and `megastep eval` with Ray, vLLM and SQLite.

`rollout` runs in tokens mode on two engines, one of which is killed; `eval` in chat mode on one.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megastep.envs import sql_data
from megastep.rollout.renderer import Renderer
from megastep.samples import store
from tests.processes import alive, descendants
from tests.rollout.markov_model import GOLD, RAMBLING, MarkovModel

QUESTION = "Which products cost more than 20?"
LIMITS = {
    "rollout.max_response_tokens": 12,
    "rollout.max_turns": 6,
    "rollout.max_prompt_tokens": 740,
}
PROMPTS = {"tokens": 20, "chat": 2}
SAMPLES = 12
SETTINGS = {
    **LIMITS,
    "data.held_out": 2,
    "rollout.prompts": PROMPTS["tokens"],
    "rollout.samples_per_prompt": SAMPLES,
    "eval.prompts": PROMPTS["chat"],
    "eval.samples_per_prompt": SAMPLES,
    "rollout.concurrency": 8,
    "engine.max_model_len": 1100,
    "env.name": "sql",
    "run.wandb": "disabled",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder, the model in it, and the arguments of both commands."""
    folder = tmp_path_factory.mktemp("end_to_end")
    sql_data.write(folder / "data", databases=2, questions=2, seed=0)
    row = {"question": QUESTION, "database": "shop_0.sqlite", "sql": GOLD}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 6)
    model = MarkovModel(folder / "model")
    (folder / "config.yaml").write_text(f"model: {{path: {model.folder}}}\n")
    given = [f"{key}={value}" for key, value in SETTINGS.items()]
    given += [f"data.train={folder}/rows.jsonl", f"env.options.databases={folder}/data/databases"]
    return folder, model, [f"{folder}/config.yaml", *given, f"run.dir={folder}/runs"]


@pytest.fixture(scope="module")
def tokens(task):
    """The file and the output of `megastep rollout`, with an engine killed during it."""
    folder, _, arguments = task
    out = folder / "out.safetensors"
    command = [
        "rollout",
        *arguments,
        "--out",
        str(out),
        "rollout.mode=tokens",
        "engine.num_engines=2",
    ]
    process = _begin(command, folder / "tokens")
    try:
        ended = _kill_an_engine(process, folder / "tokens.err")
        printed = _finish(process, folder / "tokens")
    finally:
        process.kill()
    assert 0 < ended < PROMPTS["tokens"] * SAMPLES, (
        f"the engine was killed after {ended} trajectories"
    )
    return out, printed


@pytest.fixture(scope="module")
def chat(task):
    """The file and the output of `megastep eval`."""
    folder, _, arguments = task
    process = _begin(["eval", *arguments, "rollout.mode=chat"], folder / "chat")
    try:
        printed = _finish(process, folder / "chat")
    finally:
        process.kill()
    (out,) = folder.glob("runs/config-eval-*/rollouts.safetensors")
    return out, printed


# The command, with a line of progress every 0.1 s.
COMMAND = """
import sys
from megastep import cli, console
console.LOG_EVERY_S = 0.1
sys.exit(cli.main(sys.argv[1:]))
"""


def _begin(arguments: list[str], name: Path) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with open(f"{name}.out", "w") as output, open(f"{name}.err", "w") as errors:
        command = [sys.executable, "-c", COMMAND, *arguments]
        return subprocess.Popen(command, stdout=output, stderr=errors, env=environment)


def _kill_an_engine(process: subprocess.Popen, progress: Path) -> int:
    """After 10 trajectories or more; returns how many."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        ended = [int(n) for n in re.findall(r"(\d+)/\d+ \[", progress.read_text())]
        if ended and ended[-1] >= 10:
            engines = [line for line in alive(descendants(process.pid)) if "ray::Engine" in line]
            assert len(engines) == 2, engines
            os.kill(int(engines[0].split()[0]), signal.SIGKILL)
            return ended[-1]
        time.sleep(0.02)
    return 0


def _finish(process: subprocess.Popen, name: Path) -> tuple[str, str]:
    process.wait(400)
    output = Path(f"{name}.out").read_text()
    errors = Path(f"{name}.err").read_text()
    assert process.returncode == 0, errors[-3000:]
    return output, errors


@pytest.fixture(params=["tokens", "chat"], scope="module")
def collected(request, task):
    """(mode, model, renderer, trajectories) of each command."""
    model = task[1]
    out, _ = request.getfixturevalue(request.param)
    groups = store.read(out)
    assert len(groups) == PROMPTS[request.param] and all(
        len(g.trajectories) == SAMPLES for g in groups
    )
    renderer = Renderer.for_model(model.folder, request.param)
    return request.param, model, renderer, [t for g in groups for t in g.trajectories]


def test_no_trajectory_is_lost_or_failed(collected):
    _, _, _, trajectories = collected
    assert {t.stop_reason for t in trajectories} <= {"done", "max_turns", "context"}


def test_s6_prompts_hold_the_sampled_tokens_or_the_rendered_messages(collected):
    mode, _, renderer, trajectories = collected
    assert max(len(t.steps) for t in trajectories) >= 3
    for trajectory in trajectories:
        messages = [{"role": "user", "content": _first_message(renderer, trajectory)}]
        for before, after in zip(trajectory.steps, trajectory.steps[1:]):
            if mode == "tokens":
                sequence = np.concatenate([before.prompt_ids, before.response_ids])
                assert after.prompt_ids[: len(sequence)].tolist() == sequence.tolist()
            else:
                messages += [renderer.message(before.response_ids), _observed(renderer, after)]
                assert after.prompt_ids.tolist() == renderer.prompt_ids(messages).tolist()
                assert "let me see" not in renderer.tokenizer.decode(after.prompt_ids)


def _first_message(renderer, trajectory) -> str:
    text = renderer.tokenizer.decode(trajectory.steps[0].prompt_ids)
    return text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]


def _observed(renderer, step) -> dict[str, str]:
    text = renderer.tokenizer.decode(step.prompt_ids)
    last_turn = text.split("<|im_start|>user\n")[-1]
    return {"role": "user", "content": last_turn.split("<|im_end|>")[0]}


def test_s6_tokens_and_logprobs_are_those_of_the_model(collected):
    _, model, _, trajectories = collected
    for step in (s for t in trajectories for s in t.steps):
        sampled = step.response_ids[step.loss_mask].tolist()
        chain = [int(step.prompt_ids[-1]), *sampled]
        expected = [model.logprob(a, b) for a, b in zip(chain, chain[1:])]
        assert step.logprobs[step.loss_mask] == pytest.approx(expected, abs=1e-4)


def test_s7_no_step_is_too_long(collected):
    _, _, _, trajectories = collected
    assert any(t.stop_reason == "context" for t in trajectories)
    for trajectory in trajectories:
        for step in trajectory.steps:
            assert len(step.prompt_ids) <= LIMITS["rollout.max_prompt_tokens"]
            assert len(step.response_ids) <= LIMITS["rollout.max_response_tokens"]
        if trajectory.stop_reason == "context":
            assert trajectory.steps and trajectory.steps[-1].finish == "context"


def test_s8_truncated_responses_are_closed_outside_the_loss_mask(collected):
    _, model, renderer, trajectories = collected
    truncated = [s for t in trajectories for s in t.steps if not s.loss_mask.all()]
    assert truncated
    for step in truncated:
        assert step.response_ids.tolist() == [model.ids[RAMBLING]] * 11 + [renderer.end_id]
        assert step.loss_mask.tolist() == [True] * 11 + [False] and step.logprobs[-1] == 0
        assert step.finish in ("length", "context")
    for step in (s for t in trajectories for s in t.steps):
        assert step.response_ids[-1] == renderer.end_id


def test_s9_observations_are_in_prompts_only(collected):
    _, _, renderer, trajectories = collected
    answers = {
        "SELECT colour FROM product": "no such column: colour",
        "DELETE FROM product": "not authorized",
    }
    seen = set()
    for trajectory in trajectories:
        for before, after in zip(trajectory.steps, trajectory.steps[1:]):
            response = renderer.text(before.response_ids)
            assert "error" not in response
            for query, answer in answers.items():
                if query in response:
                    assert answer in _observed(renderer, after)["content"]
                    seen.add(query)
    assert seen == set(answers)


def test_s10_routing_is_that_of_the_tokens(tokens, task):
    """In chat mode: tests/rollout/test_endpoint_vllm.py, and the mismatch of training runs."""
    model = task[1]
    for trajectory in [t for group in store.read(tokens[0]) for t in group.trajectories]:
        end = 0
        for step in trajectory.steps:
            ids = np.concatenate([step.prompt_ids, step.response_ids])
            assert step.routing_end == len(step.prompt_ids) + int(step.loss_mask.sum()) - 1
            recorded = np.sort(step.routing, axis=-1)
            expected = model.routing[ids[step.routing_start : step.routing_end]]
            assert (recorded == expected).all()
            assert step.routing_start == end
            end = step.routing_end


def test_an_evaluation_stores_no_routing(chat):
    trajectories = [t for group in store.read(chat[0]) for t in group.trajectories]
    assert all(step.routing is None for t in trajectories for step in t.steps)


def test_s17_rewards_follow_from_the_database(collected):
    _, _, renderer, trajectories = collected
    solved = [t for t in trajectories if GOLD in renderer.text(t.steps[-1].response_ids)]
    assert solved and len(solved) < len(trajectories)
    for trajectory in trajectories:
        right = any(trajectory is t for t in solved)
        assert trajectory.reward == float(right) and trajectory.env_metrics["success"] == right
        assert all(step.reward == 0 for step in trajectory.steps[:-1])


def test_s5_output_of_the_commands(tokens, chat):
    out, (output, progress) = chat
    metrics = json.loads((out.parent / "metrics.json").read_text())
    successes = [t.reward for g in store.read(out) for t in g.trajectories]
    assert (
        metrics["eval/success"] == pytest.approx(np.mean(successes))
        and metrics["eval/trajectories"] == 24
    )
    assert (
        metrics["eval/pass_at_1"] == pytest.approx(metrics["eval/success"])
        and "eval/pass_at_8" in metrics
    )
    assert f"success         {metrics['eval/success']:.3f}" in output and "pass@k" in output
    assert "24/24" in progress and "tokens/s, success" in progress
    assert "out.safetensors: written" in tokens[1][0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["eval", "env.name=chess"], "error: env.name = chess: unknown"),
        (
            ["eval", "env.options.x=1"],
            "error: env.options.x: Chase has no such option; it takes none",
        ),
        (
            ["eval", "data.train=none.jsonl"],
            "error: none.jsonl: cannot be read (No such file or directory)",
        ),
        (["eval", "data.held_out=0"], "error: data.held_out = 0: there is nothing to evaluate on"),
        (["eval", "model.path=configs/models/tiny-qwen3-moe"], "has no tokenizer"),
        (
            ["rollout", "--out", "nowhere/file"],
            "error: --out nowhere/file: must be a file in a folder",
        ),
        (
            ["rollout", "--out", "out.safetensors", "model.init=hf"],
            "error: configs/models/chase: no weights",
        ),
        (["eval", "run.resume=nowhere"], "nowhere"),
        (["eval", "run.name=mistyped"], "error: run.name = mistyped: there is no checkpoint in"),
    ],
)
def test_an_error_is_one_line_before_anything_starts(
    arguments, message, capsys, monkeypatch, tmp_path
):
    from megastep import cli
    from megastep.trainer import collect

    monkeypatch.setattr(collect, "Cluster", lambda *_, **__: pytest.fail("a cluster was started"))
    command, *rest = arguments
    assert cli.main([command, "configs/chase.yaml", f"run.dir={tmp_path}", *rest]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and line.startswith("error: ")
