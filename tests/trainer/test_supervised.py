"""`megastep sft`: the warm start alone."""

import json

import pytest

from megastep.config import load
from megastep.errors import ConfigError, DataError
from megastep.report.metrics_log import read_metrics
from megastep.trainer.rundir import Run
from megastep.trainer.supervised import load_demonstrations, train_supervised

CHASE = "configs/chase.yaml"


@pytest.fixture
def conversations(tmp_path):
    """A word that is always the same after a prompt that is not."""
    path = tmp_path / "chats.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"hops 1 from {i}"},
                {"role": "assistant", "content": "answer 7"},
            ]
        }
        for i in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(conversations, tmp_path, *given):
    settings = [
        f"run.dir={tmp_path}",
        "run.name=taught",
        f"warm_start.data={conversations}",
        "warm_start.trajectories=0",
        "warm_start.epochs=4",
        "warm_start.batch=8",
        "warm_start.lr=1e-2",
    ]
    return load(CHASE, [*settings, *given])


def test_sft_trains_on_a_file_and_leaves_a_start_for_rl(conversations, tmp_path):
    config = config_of(conversations, tmp_path)
    folder = train_supervised(config, "chase")
    rows = read_metrics(folder / "sft")
    assert [row["step"] for row in rows] == list(range(1, 9))  # 4 epochs of 16 / 8
    assert rows[-1]["train/loss"] < 0.5 * rows[0]["train/loss"]
    assert Run.find(config, "chase").checkpoint == folder / "start" / "step_0"
    with pytest.raises(ConfigError, match="run.name = taught: is trained already"):
        train_supervised(config, "chase")


def test_a_file_needs_no_environment(conversations, tmp_path):
    config = config_of(conversations, tmp_path, "env.name=null")
    assert len(load_demonstrations(config)) == 16


def test_without_demonstrations_there_is_nothing_to_train():
    with pytest.raises(ConfigError, match="warm_start.data: must be given"):
        load_demonstrations(load(CHASE, ["warm_start.trajectories=0"]))


def test_a_conversation_longer_than_a_micro_batch_is_named(conversations, tmp_path):
    messages = [
        {"role": "user", "content": "hops 1 from 2 " * 50},
        {"role": "assistant", "content": "answer 7"},
    ]
    conversations.write_text(json.dumps({"messages": messages}))
    config = config_of(conversations, tmp_path, "train.micro_batch_tokens=129")
    with pytest.raises(DataError, match=r"chats.jsonl: .*raise train.micro_batch_tokens"):
        load_demonstrations(config)
