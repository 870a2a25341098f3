"""Does a policy learn as well when episodes run ahead of training? The quickstart, both ways, from several seeds.

    python tools/bench_learning.py [--seeds 0 1 2]

Each is the whole of `launch/local.sh`, with its 32 steps, and takes two to three minutes on two idle cores. What is
compared is the success on held-out prompts after the last step, 256 trajectories: one such figure has a standard error
of 0.015.

The last line is JSON: {"synchronous", "asynchronous", "difference"}, means over the seeds. Bar: a difference of at most
0.05 either way. A missed bar is printed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # engine and policy share the cores

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megastep.report.metrics_log import read_metrics

BAR = 0.05
WAYS = {"synchronous": 0, "asynchronous": 1}  # async.max_staleness


def final_success(way: str, seed: int, folder: str) -> float:
    name = f"{way}-{seed}"
    print(f"{name} ...", file=sys.stderr, flush=True)
    given = [
        f"train.seed={seed}",
        f"async.max_staleness={WAYS[way]}",
        f"run.dir={folder}",
        f"run.name={name}",
        "run.wandb=disabled",
    ]
    command = [sys.executable, "-m", "megastep", "train", "configs/local.yaml", *given]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    last = read_metrics(Path(folder) / name)[-1]
    assert last["eval/step"] == last["step"]
    return last["eval/success"]


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        found = {seed: {way: final_success(way, seed, folder) for way in WAYS} for seed in seeds}
    print(f"{'seed':<8}{'synchronous':>14}{'asynchronous':>14}")
    for seed, row in found.items():
        print(f"{seed:<8}{row['synchronous']:>14.3f}{row['asynchronous']:>14.3f}")
    means = {way: sum(row[way] for row in found.values()) / len(found) for way in WAYS}
    difference = means["asynchronous"] - means["synchronous"]
    met = abs(difference) <= BAR
    print("the bar is met" if met else f"the bar is missed: {BAR}")
    print(
        json.dumps(
            {name: round(value, 3) for name, value in (means | {"difference": difference}).items()}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
