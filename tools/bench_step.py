"""Where the time of a training step goes.

    python tools/bench_step.py [CONFIG] [--steps N] [key=value ...]

Runs the job of CONFIG for N steps without its warm start, in a temporary run directory, and takes the median over the
steps but the first, which pays for caches:

    rollout   engines and agents: the driver plays the environments and renders prompts while engines sample
    layout    credit, folding, packing: the driver
    update    policy ranks; sending them their micro-batches included
    sync      weights into the engines
    other     filters, metrics, logs, from the end of a step to the end of the next: the driver

`driver_share` is (layout + other) / step: what the driver adds while neither engines nor ranks work. Bar: 5%; a
missed one is printed. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from megastep.report.metrics_log import read_metrics

PARTS = ("rollout", "layout", "update", "sync")
BAR = 0.05


def measure(config: str, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """Seconds of the parts of each step, and of all of it."""
    with tempfile.TemporaryDirectory() as folder:
        given = [
            f"run.dir={folder}",
            "run.name=bench",
            f"train.steps={steps + 1}",
            "run.rollouts_every=0",
            "warm_start.trajectories=0",
            "eval.prompts=1",
            "eval.samples_per_prompt=1",
            "optimizer.warmup_steps=0",
            "checkpoint.every_steps=0",
            *overrides,
        ]
        subprocess.run([sys.executable, "-m", "megastep", "train", config, *given], check=True)
        rows = read_metrics(Path(folder) / "bench")[1:-1]  # the last step evaluates
    return [
        {part: row[f"time/{part}_s"] for part in PARTS}
        | {"step": row["time/run_s"] - before["time/run_s"]}
        for before, row in zip(rows, rows[1:])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="configs/local.yaml")
    parser.add_argument("--steps", type=int, default=8, help="how many to take")
    args, overrides = parser.parse_known_args()
    steps = measure(args.config, args.steps, overrides)
    for step in steps:
        step["other"] = step["step"] - sum(step[part] for part in PARTS)
    seconds = {name: median(step[name] for step in steps) for name in (*PARTS, "other", "step")}
    for name, value in seconds.items():
        print(f"{name:<10}{value:8.3f} s {value / seconds['step']:7.1%}")
    share = median((step["layout"] + step["other"]) / step["step"] for step in steps)
    print("the bar is met" if share <= BAR else f"the bar of {BAR:.0%} is missed")
    print(
        json.dumps(
            {"driver_share": round(share, 4), **{f"{n}_s": round(v, 4) for n, v in seconds.items()}}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
