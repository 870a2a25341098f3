"""How well `megastep plan --simulate` predicts throughput.

    quickstart       configs/local.yaml (chase, two ranks, one engine): from a run with half the
                     trajectories per prompt to the recipe's own, and to asynchronous training
    bench_async      long-tailed latency (tools/bench_async.py): from the synchronous run to the
                     asynchronous one; the simulation has the same latencies
    published        NeMo-RL v0.6 on H100s, from its performance page: nothing is measured, all
                     times are a roofline's with the assumptions of megastep/simulate/hardware.py

Predictions use no figure of the run that they predict, except the lengths of its episodes. The runs
of a case share one cluster and follow each other, since the speed of a shared machine drifts.
Trajectories per second of wall time, without the first and last training steps. About twelve
minutes; --only NAME runs one part.

    python tools/bench_simulate.py [--only quickstart|bench_async|published]

The last line is JSON: predicted / measured of each case. Bar: 0.85 to 1.15 for the runs; a roofline
is an upper bound, and its ratio is printed for what it is. A missed bar is printed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # engine and policy share the cores

import json
import math
import random
import sys
import tempfile
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # for find_env
warnings.filterwarnings("ignore")

import bench_async

from megastep.cluster import Cluster
from megastep.config import Config, load
from megastep.plan.planning import make_plan
from megastep.report.metrics_log import MetricsLog, read_metrics
from megastep.rollout.task import Task
from megastep.simulate.episodes import Distributions, Episode, Episodes, Recorded
from megastep.simulate.hardware import Hardware
from megastep.simulate.measured import Calibration, Measured, MeasuredRun
from megastep.simulate.roofline import Roofline
from megastep.simulate.simulation import simulate
from megastep.trainer.loop import Loop
from megastep.trainer.rundir import Run
from megastep.types import Group

LOW, HIGH = 0.85, 1.15
QUICKSTART = [
    "run.wandb=disabled",
    "run.rollouts_every=1",
    "checkpoint.every_steps=0",
    "checkpoint.every_minutes=0",
    "eval.prompts=1",
    "eval.samples_per_prompt=1",
    "optimizer.warmup_steps=0",
]


# ---------------------------------------------------------------- runs


def run(name: str, config: Config, cluster: Cluster, demonstrations: list[Group]) -> Path:
    """A training run in the folder run.dir/name."""
    config.run.name = name
    found = Run.find(config, name)
    found.create(config)
    with MetricsLog(found.folder, found.last_row, "disabled", {}) as log:
        Loop(config, Task.load(config), cluster, found, log).run(demonstrations)
    return found.folder


def edge_of(config: Config) -> int:
    """Training steps at either end that do not count."""
    return 1 + math.ceil(config.asynchronous.max_staleness)


def measured_speed(folder: Path, config: Config) -> float:
    """Trajectories per second."""
    edge = edge_of(config)
    rows = read_metrics(folder)[1:][edge:-edge]
    seconds = sum(row["time/step_s"] - row.get("time/eval_s", 0) for row in rows)
    return sum(row["rollout/trajectories"] for row in rows) / seconds


def calibrate(folder: Path, config: Config, episodes: Episodes) -> Measured:
    found = replace(MeasuredRun.read(folder), config=config)
    plan = make_plan(config)

    def simulated(times: Measured) -> Calibration:
        result = simulate(config, plan, times, episodes, len(found.rows))
        return Calibration(result.mean("time/rollout_s"), result.mean("train/tokens_computed"))

    return found.calibrated(simulated)


def predicted_speed(config: Config, times: Measured, episodes: Episodes) -> float:
    steps = config.train.steps - 2 * edge_of(config)
    return simulate(config, make_plan(config), times, episodes, steps).trajectories_per_s


# ---------------------------------------------------------------- quickstart


def quickstart(folder: str) -> dict[str, tuple[float, float]]:
    def config(steps: int, *overrides: str) -> Config:
        return load(
            "configs/local.yaml",
            [*QUICKSTART, f"run.dir={folder}", f"train.steps={steps}", *overrides],
        )

    half = config(14, "rollout.samples_per_prompt=8")
    predicted = {
        "quickstart": config(14),
        "quickstart, async": config(20, "async.max_staleness=1"),
    }
    with Cluster(half, log=Path(folder) / "log.txt") as cluster:
        task = Task.load(half)
        first = run("half", half, cluster, task.demonstrations())
        folders = {name: run(name, c, cluster, []) for name, c in predicted.items()}
    times = calibrate(first, half, MeasuredRun.read(first).episodes("0"))
    print(f"times of the run with half the trajectories: {times}")
    results = {}
    for name, case in predicted.items():
        episodes = MeasuredRun.read(folders[name]).episodes("0")
        speed = measured_speed(folders[name], case)
        results[name] = predicted_speed(case, times, episodes), speed
    return results


# ---------------------------------------------------------------- bench_async


class SlowEpisodes:
    """Turns of recorded episodes, with the latencies that bench_async.Slow draws."""

    def __init__(self, recorded: Recorded, task: Task):
        self.recorded = recorded
        self.stream = task.stream()

    def episode(self, prompt: int, index: int) -> Episode:
        found = self.recorded.episode(prompt, index)
        row = json.dumps(self.stream.prompt(prompt).row)
        drawn = random.Random(f"{row}/{index}")
        turns = [
            replace(turn, env_s=drawn.lognormvariate(bench_async.MU, bench_async.SIGMA))
            for turn in found.turns
        ]
        return Episode(turns, found.reward)

    def describe(self) -> str:
        return "of bench_async"


def slow(folder: str) -> dict[str, tuple[float, float]]:
    configs = {
        name: bench_async.make_config(
            folder, bench_async.MAX_STALENESS if name == "asynchronous" else 0, steps
        )
        for name, steps in bench_async.STEPS.items()
    }
    folders: dict[str, Path] = {}
    with Cluster(configs["asynchronous"], log=Path(folder) / "log.txt") as cluster:
        for name, config in configs.items():
            config.run.rollouts_every = 1
            bench_async.environment().seen.clear()
            folders[name] = run(name, config, cluster, [])
    config = configs["synchronous"]
    recorded = MeasuredRun.read(folders["synchronous"]).episodes("0")
    assert isinstance(recorded, Recorded)
    episodes = SlowEpisodes(recorded, Task.load(config))
    times = calibrate(folders["synchronous"], config, episodes)
    print(f"times of the synchronous run: {times}")
    case = configs["asynchronous"]
    predicted = predicted_speed(case, times, episodes)
    return {"bench_async": (predicted, measured_speed(folders["asynchronous"], case))}


# ---------------------------------------------------------------- published

# https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html: GRPO, H100, bf16; tokens per
# second and GPU. Lengths are assumed uniform with the published mean, up to the published maximum.
_30B = [
    "rollout.prompts=64",
    "rollout.samples_per_prompt=32",
    "rollout.concurrency=2048",
    "rollout.max_turns=1",
    "rollout.max_response_tokens=3946",
    "engine.max_model_len=4096",
    "engine.max_sequences=256",
    "engine.tensor_parallel=2",
    "train.micro_batch_tokens=4096",
    "train.mini_batch_prompts=16",
    "policy.recompute=[]",
    "policy.parallel.expert=8",
]
_235B = [
    "rollout.prompts=16",
    "rollout.samples_per_prompt=32",
    "rollout.concurrency=512",
    "rollout.max_turns=1",
    "rollout.max_response_tokens=8000",
    "engine.max_model_len=8192",
    "engine.max_sequences=256",
    "train.mini_batch_prompts=16",
    "policy.parallel.expert=16",
]
_COLOCATED_235B = [
    *_235B,
    "policy.parallel.tensor=2",
    "policy.parallel.context=2",
    "train.pack_layout=flat",
    "train.micro_batch_tokens=4096",
    "engine.tensor_parallel=16",
]
_ONE_TURN = {"turns": "1", "prompt-tokens": "150", "env-seconds": "0"}
_30B_EPISODES = _ONE_TURN | {"response-tokens": "2160..3946"}
_235B_EPISODES = _ONE_TURN | {"response-tokens": "3126..8000"}
PUBLISHED = {
    "30B-A3B, on-policy, 32 GPUs": (
        1102,
        "configs/h100/qwen3-30b-a3b.yaml",
        [*_30B, "policy.ranks=32", "policy.parallel.pipeline=1", "engine.num_engines=16"],
        _30B_EPISODES,
    ),
    "30B-A3B, one step off, 32 GPUs": (
        1414,
        "configs/h100/qwen3-30b-a3b-disaggregated.yaml",
        [
            *_30B,
            "policy.ranks=16",
            "policy.parallel.pipeline=2",
            "engine.num_engines=8",
            "optimizer.cpu_offload_fraction=0",
        ],
        _30B_EPISODES,
    ),
    "235B-A22B, on-policy, 128 GPUs": (
        58.9,
        "configs/h100/qwen3-235b-a22b.yaml",
        [*_COLOCATED_235B, "policy.ranks=128", "engine.num_engines=8"],
        _235B_EPISODES,
    ),
    "235B-A22B, on-policy, 256 GPUs": (
        37.4,
        "configs/h100/qwen3-235b-a22b.yaml",
        [*_COLOCATED_235B, "policy.ranks=256", "engine.num_engines=16"],
        _235B_EPISODES,
    ),
    "235B-A22B, one step off, 256 GPUs": (
        58.7,
        "configs/h100/qwen3-235b-a22b-disaggregated.yaml",
        [
            *_235B,
            "policy.ranks=128",
            "policy.parallel.tensor=4",
            "train.micro_batch_tokens=8192",
            "engine.num_engines=16",
            "engine.tensor_parallel=8",
        ],
        _235B_EPISODES,
    ),
}


def published(folder: str) -> dict[str, tuple[float, float]]:
    results = {}
    for name, (figure, path, overrides, lengths) in PUBLISHED.items():
        config = load(path, overrides, has_cuda=True)
        plan = make_plan(config)
        episodes = Distributions.of(config, dict(lengths))
        result = simulate(config, plan, Roofline(config, plan, Hardware()), episodes, steps=4)
        results[name] = (result.tokens_per_gpu_s, float(figure))
    return results


# ---------------------------------------------------------------- the table

PARTS: dict[str, Callable[[str], dict[str, tuple[float, float]]]] = {
    "quickstart": quickstart,
    "bench_async": slow,
    "published": published,
}


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS))
    only = parser.parse_args().only
    results: dict[str, tuple[float, float]] = {}
    missed = []
    for part in [only] if only else PARTS:
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](folder)
        results |= found
        if part != "published":
            missed += [name for name, (p, m) in found.items() if not LOW <= p / m <= HIGH]
    title = "published" if only == "published" else "measured"
    print(f"{'':<36}{'predicted':>12}{title:>12}{'ratio':>8}")
    for name, (predicted, actual) in results.items():
        print(f"{name:<36}{predicted:>12.4g}{actual:>12.4g}{predicted / actual:>8.2f}")
    if only != "published":
        print(f"missed: {', '.join(missed)}" if missed else f"runs: within {LOW} to {HIGH}")
    print(json.dumps({name: round(p / m, 3) for name, (p, m) in results.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
