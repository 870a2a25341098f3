"""Held-out success of synchronous and asynchronous training: the quickstart with several seeds.

    python tools/bench_learning.py [--seeds 0 1 2]

Each run is all of `launch/local.sh chase`, 32 training steps, and takes two to three minutes on two
idle cores. Success is that of held-out prompts after the last step: 256 trajectories, standard
error 0.015.

The last line is JSON: {"synchronous", "asynchronous", "difference"}, means over the seeds. Bar: an
absolute difference of at most 0.05. A missed bar is printed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # engine and policy share the cores

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megastep.report.metrics_log import read_metrics

BAR = 0.05
MAX_STALENESS = {"synchronous": 0, "asynchronous": 1}


def final_success(mode: str, seed: int, folder: str) -> float:
    name = f"{mode}-{seed}"
    print(f"{name} ...", file=sys.stderr, flush=True)
    given = [
        f"train.seed={seed}",
        f"async.max_staleness={MAX_STALENESS[mode]}",
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
        found = {
            seed: {mode: final_success(mode, seed, folder) for mode in MAX_STALENESS}
            for seed in seeds
        }
    print(f"{'seed':<8}{'synchronous':>14}{'asynchronous':>14}")
    for seed, row in found.items():
        print(f"{seed:<8}{row['synchronous']:>14.3f}{row['asynchronous']:>14.3f}")
    means = {mode: mean(row[mode] for row in found.values()) for mode in MAX_STALENESS}
    difference = means["asynchronous"] - means["synchronous"]
    is_met = abs(difference) <= BAR
    print("the bar is met" if is_met else f"the bar is missed: {BAR}")
    result = means | {"difference": difference}
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
