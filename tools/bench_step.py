"""Time of the parts of a training step.

    python tools/bench_step.py [CONFIG] [--steps N] [key=value ...]

Runs CONFIG for N training steps without its warm start, in a temporary run directory. Medians over
the steps but the first, which fills caches:

    rollout   engines and agents: the driver runs environments and renders prompts
    pack      advantages, trie, packing, in the driver
    update    policy ranks, with the transfer of their micro-batches
    sync      weight sync
    other     filters, metrics and logs, in the driver

`driver_share` is (pack + other) / step: driver time while neither engines nor ranks work. Bar: 5%;
a missed bar is printed. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from megastep.report.metrics_log import read_metrics

PARTS = ("rollout", "pack", "update", "sync")
BAR = 0.05


def measure(config: str, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """Seconds of each training step and of its parts."""
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
            "checkpoint.every_minutes=0",
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
    parser.add_argument("--steps", type=int, default=8, help="training steps to measure")
    args, overrides = parser.parse_known_args()
    steps = measure(args.config, args.steps, overrides)
    for step in steps:
        step["other"] = step["step"] - sum(step[part] for part in PARTS)
    seconds = {name: median(step[name] for step in steps) for name in (*PARTS, "other", "step")}
    for name, value in seconds.items():
        print(f"{name:<10}{value:8.3f} s {value / seconds['step']:7.1%}")
    share = median((step["pack"] + step["other"]) / step["step"] for step in steps)
    print("the bar is met" if share <= BAR else f"the bar of {BAR:.0%} is missed")
    result = {"driver_share": share} | {f"{name}_s": value for name, value in seconds.items()}
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
