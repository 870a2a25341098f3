"""loss.type=distill: a student learns from a teacher's logprobs of its own samples."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from megastep.config import load
from megastep.conversion import commands
from megastep.report.metrics_log import read_metrics
from megastep.trainer import collect
from megastep.trainer.loop import train
from megastep.trainer.supervised import train_supervised

CHASE = "configs/chase.yaml"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A chase model trained on demonstrations, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("teacher")
    given = [f"run.dir={folder}", "run.name=sft", "warm_start.trajectories=1500"]
    run = train_supervised(load(CHASE, [*given, "warm_start.epochs=2"]), "chase")
    export = Namespace(
        direction="export",
        source=run / "start" / "step_0",
        destination=folder / "hf",
        shard_size=10**9,
    )
    assert commands.run(export) == 0
    return folder / "hf"


def test_a_student_comes_closer_to_its_teacher(teacher, tmp_path):
    """From random weights, without rewards or demonstrations; one sample per prompt is enough."""
    given = [
        f"run.dir={tmp_path}",
        "run.name=student",
        "loss.type=distill",
        f"loss.teacher={teacher}",
        "warm_start.trajectories=0",
        "rollout.prompts=64",
        "rollout.samples_per_prompt=1",
        "train.steps=16",
        "train.mini_batch_prompts=16",
        "optimizer.lr=2e-3",
        "routing_replay.min_agreement=0",  # random weights change quickly
        "eval.prompts=8",
        "eval.samples_per_prompt=1",
    ]
    rows = read_metrics(train(load(CHASE, given), "chase"))[1:]
    kl = [row["train/kl_teacher"] for row in rows]
    assert kl[0] > 1 and sum(kl[-3:]) / 3 < 0.5 * kl[0], kl


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["loss.type=distill"], "loss.teacher: must be given"),
        (["loss.teacher=configs/models/chase"], "has no teacher"),
        (["loss.type=distill", "loss.teacher=nowhere"], "loss.teacher: "),
        (
            ["loss.type=distill", "loss.teacher=configs/models/bytes"],
            "they must be equal",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_rejected(given, problem):
    from megastep.errors import ConfigError

    with pytest.raises(ConfigError) as raised:
        load(CHASE, given)
    assert problem in str(raised.value)


def test_a_teacher_with_too_few_positions_is_rejected(tmp_path):
    from megastep.errors import ConfigError

    shutil.copytree("configs/models/chase", tmp_path / "teacher")
    path = tmp_path / "teacher" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 128}))
    with pytest.raises(ConfigError, match="has 128 positions, a model call up to 256 tokens"):
        load(CHASE, ["loss.type=distill", f"loss.teacher={tmp_path / 'teacher'}"])


def test_an_evaluation_needs_no_teacher(monkeypatch):
    """Its ranks would load the weights for nothing."""

    def started(config, **_):
        assert (config.loss.type, config.loss.teacher) == ("nll", None)
        raise InterruptedError

    monkeypatch.setattr(collect, "Cluster", started)
    given = ["loss.type=distill", "loss.teacher=configs/models/chase"]
    with pytest.raises(InterruptedError):
        collect._generate(
            load(CHASE, given), None, lambda generate: None, [], Path("log.txt"), Path("out")
        )


def test_a_teacher_without_weights_is_rejected_before_the_start(tmp_path):
    from megastep.errors import WeightsError

    given = ["loss.type=distill", "loss.teacher=configs/models/chase", f"run.dir={tmp_path}"]
    with pytest.raises(WeightsError, match="configs/models/chase: no weights"):
        train(load(CHASE, given), "chase")


def test_without_rewards_no_group_is_degenerate():
    """filters.zero_variance and dynamic_sampling would drop them all."""
    from megastep.samples import filters
    from tests.policy.updates import make_groups

    groups = make_groups(replay=False)
    for group in groups:
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                step.reward = 0.0
    given = ["filters.zero_variance=true"]
    kept = {}
    for loss in (
        ["loss.type=ppo_clip"],
        ["loss.type=distill", "loss.teacher=configs/models/chase"],
    ):
        kept[loss[0]] = len(filters.apply(groups, load(CHASE, [*given, *loss]))[0])
    assert kept == {"loss.type=ppo_clip": 0, "loss.type=distill": len(groups)}
