"""Where the time of a training step goes.

    python tools/bench_step.py [CONFIG] [--steps N] [key=value ...]

Runs the job of CONFIG for N steps without its warm start, in a temporary run directory, and takes the median over the
steps but the first, which pays for caches:

    rollout   engines and agents: the driver plays the environments and renders prompts while engines sample
    layout    credit, folding, packing: the driver
    update    policy ranks; sending them their micro-batches included
    sync      weights into the engines
    other     filters, metrics, logs: the driver

`driver_share` is (layout + other) / step: what the driver adds while neither engines nor ranks work. The last line is
JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from megastep.report import read_metrics

PARTS = ("rollout", "layout", "update", "sync")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="configs/local.yaml")
    parser.add_argument("--steps", type=int, default=6)
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        given = [f"run.dir={folder}", "run.name=bench", "run.wandb=disabled", f"train.steps={args.steps}",
                 "warm_start.trajectories=0", "eval.prompts=1", "eval.samples=1", "optimizer.warmup_steps=0",
                 *overrides]
        subprocess.run([sys.executable, "-m", "megastep", "train", args.config, *given], check=True)
        rows = [row for row in read_metrics(Path(folder) / "bench") if row["step"] >= 2]
    seconds = {part: statistics.median(row[f"time/{part}_s"] for row in rows) for part in PARTS}
    whole = statistics.median(row["time/step_s"] - row.get("time/eval_s", 0.0) for row in rows)
    seconds["other"] = statistics.median(
        row["time/step_s"] - row.get("time/eval_s", 0.0) - sum(row[f"time/{part}_s"] for part in PARTS) for row in rows
    )
    for part, value in seconds.items():
        print(f"{part:<10}{value:8.3f} s {value / whole:7.1%}")
    share = (seconds["layout"] + seconds["other"]) / whole
    print(json.dumps({"driver_share": round(share, 4), "step_s": round(whole, 3),
                      **{f"{part}_s": round(value, 4) for part, value in seconds.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
