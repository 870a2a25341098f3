"""S17: chase is learned, colocated and disaggregated, with engines that agree with the trainer.
Not run yet.
"""

import subprocess
import sys

import pytest


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "colocate",
    [True, pytest.param(False, marks=pytest.mark.gpus(2))],
    ids=["colocated", "disaggregated"],
)
def test_s17_chase_is_learned(colocate, free_gpus, figure, tmp_path):
    """In fp32, without TF32 as conftest.py sets it."""
    from megastep.report.metrics_log import read_metrics

    command = [
        sys.executable,
        "-m",
        "megastep",
        "train",
        "configs/chase.yaml",
        f"run.dir={tmp_path}",
        "run.name=gpu",
        f"cluster.colocate={str(colocate).lower()}",
        "run.wandb=disabled",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_metrics(tmp_path / "gpu")
    figure("training/mismatch", max(row["mismatch/max_abs"] for row in rows[1:]))
    figure("training/failures", 1 - rows[-1]["eval/success"])
