"""Step-wise training under the three pack layouts: the same run, from the same seed.

    python tools/bench_stepwise.py [CONFIG] [--steps 6] [--picture FILE.png] [key=value ...]

    flat     each model call is a sequence of its own
    merge    calls that extend each other are one sequence: training on whole trajectories
    trie     each distinct token of a prompt's trajectories once

Runs CONFIG (default: configs/arithmetic.yaml) with each. The objective is the same, so the curves
differ by rounding, which sampling amplifies after the first steps; tokens and seconds differ. The
table has means over the training steps but the first, which fills caches.

The last line is JSON: {LAYOUT: {"success_first", "success_last", "tokens_computed", "update_s",
"step_s"}, "max_success_gap"}: the gap is the largest difference of the training success of two
layouts at the same step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep.report.metrics_log import read_metrics

LAYOUTS = ("flat", "merge", "trie")
COLOURS = {"flat": "#d97706", "merge": "#6b7280", "trie": "#2563eb"}
WIDTHS = {"flat": 6.0, "merge": 3.5, "trie": 1.4}  # equal curves stay visible
COLUMNS = {"tokens_computed": "train/tokens_computed", "update_s": "time/update_s"}


def run(config: str, layout: str, steps: int, overrides: list[str], folder: Path) -> list[dict]:
    given = [
        f"run.dir={folder}",
        f"run.name={layout}",
        f"train.steps={steps}",
        f"train.pack_layout={layout}",
        "checkpoint.every_steps=0",
        "checkpoint.every_minutes=0",
        "run.wandb=disabled",
        *overrides,
    ]
    subprocess.run([sys.executable, "-m", "megastep", "train", config, *given], check=True)
    return read_metrics(folder / layout)


def summary(rows: list[dict]) -> dict[str, float]:
    steps = rows[1:]
    later = steps[1:] or steps
    held_out = [row["eval/success"] for row in rows if "eval/success" in row]
    found = {"success_first": held_out[0], "success_last": held_out[-1]}
    found |= {name: mean(row[key] for row in later) for name, key in COLUMNS.items()}
    seconds = [row["time/step_s"] - row.get("time/eval_s", 0.0) for row in later]
    return found | {"step_s": mean(seconds)}


def success_gap(runs: dict[str, list[dict]]) -> float:
    curves = [[row["reward/success"] for row in rows[1:]] for rows in runs.values()]
    return max(max(values) - min(values) for values in zip(*curves))


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    from matplotlib.figure import Figure

    panels = {
        "success in training": "reward/success",
        "tokens computed per step": "train/tokens_computed",
        "seconds per update": "time/update_s",
    }
    figure = Figure(figsize=(11, 2.9), dpi=110, layout="constrained")
    for i, (title, key) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), i + 1)
        for layout, rows in runs.items():
            steps = rows[1:]
            axes.plot(
                [row["step"] for row in steps],
                [row[key] for row in steps],
                label=layout,
                color=COLOURS[layout],
                marker="o",
                markersize=3,
                linewidth=WIDTHS[layout],
            )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("training step", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, framealpha=0.7, edgecolor="none")
    figure.savefig(path, format="png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="configs/arithmetic.yaml")
    parser.add_argument("--steps", type=int, default=6, help="training steps of each run (6)")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the curves")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            layout: run(args.config, layout, args.steps, overrides, Path(folder))
            for layout in LAYOUTS
        }
    result: dict = {layout: summary(rows) for layout, rows in runs.items()}
    names = list(result[LAYOUTS[0]])
    print(f"{'':8}" + "".join(f"{name:>17}" for name in names))
    for layout in LAYOUTS:
        print(f"{layout:8}" + "".join(f"{result[layout][name]:17.4g}" for name in names))
    result["max_success_gap"] = success_gap(runs)
    print(f"largest difference of success in training: {result['max_success_gap']:.3f}")
    if args.picture is not None:
        draw(runs, args.picture)
        print(f"wrote {args.picture}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
