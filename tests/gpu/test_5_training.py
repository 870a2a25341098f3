"""Expected: held-out success on chase of at least 0.9 after 24 training steps, colocated and
disaggregated; the largest mismatch between engine and trainer below 1e-2 in fp32. Not run yet.
"""

import subprocess
import sys

import pytest

from megastep.report.metrics_log import read_metrics


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "colocate",
    [True, pytest.param(False, marks=pytest.mark.gpus(2))],
    ids=["colocated", "disaggregated"],
)
def test_s17_chase_is_learned(colocate, tmp_path):
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
    assert rows[-1]["eval/success"] >= 0.9
    assert max(row["mismatch/max_abs"] for row in rows[1:]) < 1e-2
