"""A run of `megastep train` whose agent is a command: curl, the SDKs, and a team of sub-agents."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from megastep.distributed.ports import free_port
from megastep.report.metrics_log import read_metrics
from megastep.samples import store
from megastep.types import Group
from tests import cases
from tests.policy.updates import steps_of
from tests.runs import BARE, begin, megastep, run

pytestmark = pytest.mark.timeout(600)
CLIENTS = ("curl", "openai", "anthropic", "team")
CALLS = {"curl": 1, "openai": 2, "anthropic": 2, "team": 6}
# A step of Adam that is the gradient, almost: lr · g / (|g| + eps).
AS_GRADIENT = {
    "optimizer.lr": 1.0,
    "optimizer.eps": 1.0,
    "optimizer.clip_grad": 0.0,
    "loss.type": "reinforce",
    "advantage.estimator": "rloo",
    "model.init": "random",
    "routing_replay.min_agreement": 0.0,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two training steps; the run directory, the metrics, and the groups of each step."""
    folder = tmp_path_factory.mktemp("agents")
    rows = [json.dumps({"client": client}) + "\n" for client in CLIENTS]
    (folder / "rows.jsonl").write_text("".join(rows))
    given = [
        *BARE,
        "env.name=null",
        f"agent.command=[sh, tests/rollout/agent.sh, {sys.executable}]",
        "agent.reasoning_parser=none",
        f"data.train={folder}/rows.jsonl",
        f"data.eval={folder}/rows.jsonl",
        "rollout.prompts=4",
        "rollout.samples_per_prompt=2",
        "rollout.max_turns=8",
        "rollout.concurrency=4",
        "train.mini_batch_prompts=4",
        "train.steps=2",
        "eval.prompts=1",
        "eval.samples_per_prompt=1",
        "run.rollouts_every=1",
    ]
    done = run(megastep("train", folder, "run", *given))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    files = [folder / "run" / "rollouts" / f"step_{n}.safetensors" for n in (1, 2)]
    return folder / "run", read_metrics(folder / "run"), [store.read(file) for file in files]


def client_of(trajectory) -> str:
    (name,) = set(trajectory.env_metrics) & {*CLIENTS}
    return name


def test_every_client_is_recorded_and_trained(trained):
    _, metrics, steps = trained
    for groups in steps:
        trajectories = [t for group in groups for t in group.trajectories]
        assert all(t.stop_reason == "done" for t in trajectories), [
            t.env_metrics for t in trajectories
        ]
        counts = {client_of(t): len(t.steps) for t in trajectories}
        assert counts == CALLS
        for step in steps_of(groups):
            assert step.routing is not None and step.loss_mask.any()
            sampled = step.response_ids[: step.loss_mask.sum()]
            assert len(sampled) and (step.logprobs[: len(sampled)] <= 0).all()
    rows = [row for row in metrics if "train/loss" in row]
    assert len(rows) == 2
    for row, groups in zip(rows, steps):
        assert row["train/tokens_computed"] == row["train/tokens_distinct"]
        assert row["train/tokens_trained"] == sum(s.loss_mask.sum() for s in steps_of(groups))
        assert row["routing_replay/free_fraction"] == 0
        assert row["mismatch/max_abs"] < 1e-4
        assert row["rollout/stop_done"] == 1 and row["turn/role_planner"] > 0


def test_calls_of_a_team_train_as_the_single_calls_do(trained, ranks):
    """Parallel sub-agents and a compacted history: the gradient of the trie is that of its steps,
    each computed alone, with the same routing."""
    _, _, (groups, _) = trained
    team = [group for group in groups if client_of(group.trajectories[0]) == "team"]
    assert [t.env_metrics["roles"].count("worker") for t in team[0].trajectories] == [3, 3]
    found = {}
    for name, settings in {
        "trie": {},
        "flat": {"train.pack_layout": "flat"},
        "before": {"optimizer.lr": 0.0},
    }.items():
        ((learned, (update,)),) = ranks(1).run(
            cases.learn,
            folder="configs/models/chase",
            settings=AS_GRADIENT | settings,
            batches=[[Group(g.id, g.trajectories) for g in team]],
        )[0]
        found[name] = (learned, update["parameters"])
    computed = {name: learned["train/tokens_computed"] for name, (learned, _) in found.items()}
    assert computed["trie"] == found["trie"][0]["train/tokens_distinct"] < computed["flat"]
    largest = 0.0
    for name, before in found["before"][1].items():
        gradient = before - found["flat"][1][name]
        largest = max(largest, np.abs(gradient).max())
        off = np.abs(found["trie"][1][name] - found["flat"][1][name]).max()
        assert off <= 1e-5 * max(1.0, np.abs(gradient).max()), name
    assert largest > 1e-3


def test_a_checkpoint_is_served_and_its_calls_are_recorded(trained, tmp_path):
    folder, _, _ = trained
    out = tmp_path / "calls.safetensors"
    port = free_port()
    command = [sys.executable, "-m", "megastep", "serve", str(folder), f"--port={port}"]
    server = begin([*command, f"--record={out}"])
    try:
        exported = {}
        while len(exported) < 4:
            line = server.stdout.readline()
            assert line, server.stderr.read()[-2000:]
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").strip().partition("=")
                exported[name] = value
        assert exported["OPENAI_BASE_URL"].startswith(f"http://127.0.0.1:{port}/")
        environment = os.environ | exported
        client = [sys.executable, "tests/rollout/agent_clients.py"]
        done = subprocess.run(
            client, input='{"client": "openai"}', env=environment, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        server.send_signal(signal.SIGINT)
        printed, errors = server.communicate(timeout=60)
        assert server.returncode == 0 and f"{out}: 2 calls written" in printed, errors[-2000:]
    finally:
        server.kill()
    ((trajectory,),) = [group.trajectories for group in store.read(out)]
    assert len(trajectory.steps) == 2
    assert trajectory.steps[0].versions[:, 0].tolist() == [2]  # of the checkpoint, two steps
    assert trajectory.sampling is not None and trajectory.sampling["temperature"] == 1
