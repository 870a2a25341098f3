"""D7: metrics.jsonl, wandb and TensorBoard."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megastep import config
from megastep.errors import ConfigError
from megastep.report.metrics_log import MetricsLog, read_metrics


def scalars(folder: Path) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


@pytest.mark.parametrize("by", ["another process", "restarted ranks"])
def test_d7_tensorboard_equals_metrics_jsonl(by, tmp_path):
    log = MetricsLog(tmp_path, 0, "disabled", {}, tensorboard=True)
    for number in (1, 2, 3):
        log.write(number, {"train/loss": number / 2, "turn/count": number})
    # Resumed after training step 2: step 3 is repeated.
    if by == "restarted ranks":
        log.rewind(2)
    else:
        log.close()
        log = MetricsLog(tmp_path, 2, "disabled", {}, tensorboard=True)
    log.write(3, {"train/loss": 9.0, "turn/count": 9})
    log.close()
    assert scalars(tmp_path) == {
        "train/loss": [(1, 0.5), (2, 1.0), (3, 9.0)],
        "turn/count": [(1, 1.0), (2, 2.0), (3, 9.0)],
    }
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == [0.5, 1.0, 9.0]


WITHOUT_HELPER = """
import os, signal, sys
from pathlib import Path
from megastep.report.metrics_log import MetricsLog
from tests.processes import alive, descendants, wait_for

with MetricsLog(Path(sys.argv[1]), 0, "offline", {}) as log:
    log.write(1, {"train/loss": 1.0})
    helpers = descendants(os.getpid())
    assert helpers, "wandb has no helper process to stop"
    for pid, _ in helpers:
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not alive(helpers), 60)
    log.write(2, {"train/loss": 2.0})
"""


def test_d7_no_traceback_when_wandb_was_stopped(tmp_path):
    """Stopping a Ray job sends SIGTERM to all of its processes, wandb's helper included."""
    # An earlier test in this process may have left the address of its helper, which is not stopped.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    command = [sys.executable, "-c", WITHOUT_HELPER, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("wandb did not ") and len(done.stderr.splitlines()) <= 2
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_d7_tensorboard_is_off_by_default(tmp_path):
    log = MetricsLog(tmp_path, 0, "disabled", {})
    log.write(1, {"train/loss": 1.0})
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_d7_tensorboard_that_is_not_installed(monkeypatch):
    assert config.load("configs/local.yaml", ["run.tensorboard=true"]).run.tensorboard
    monkeypatch.setattr("megastep.config.checks.find_spec", lambda name: None)
    assert not config.load("configs/local.yaml").run.tensorboard
    with pytest.raises(ConfigError, match="run.tensorboard = True: needs the package tensorboard"):
        config.load("configs/local.yaml", ["run.tensorboard=true"])
