"""Speedup of asynchronous over synchronous training, in an environment with long-tailed latency.

    latency       log-normal before every environment answer: mean 0.5 s, the top percent 5 s
    synchronous   async.max_staleness = 0: a batch waits for its slowest episode, training for it
    asynchronous  async.max_staleness = 8
    rollout       the same episodes without training    } upper bounds: no schedule of both is
    training      the same batches without rollout      } faster than the slower of them

Ray, a vLLM engine, one policy rank, chase with its tiny model and random weights: 16 prompts × 4
samples of up to 5 turns, 32 concurrent episodes in every case. The latencies of an episode follow
from its prompt, so that all cases have the same ones. Trajectories per second of wall time, without
the first and last training steps, where the pipeline fills and drains. About eight minutes.

The rest of the bound is lost to the tail: an episode of 40 s occupies a slot, and delays training
once it is due. A smaller max_staleness would measure the tail, not the overlap.

    python tools/bench_async.py

The last line is JSON: {"speedup": asynchronous / synchronous, "bound_share": asynchronous / slower
bound}. Bars: 2.0 and 0.85. A missed bar is printed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # engine and policy share the cores

import asyncio
import json
import math
import random
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

from megastep.cluster import Cluster
from megastep.config import Config, load
from megastep.envs.chase import Chase
from megastep.report.metrics_log import MetricsLog, read_metrics
from megastep.rollout.env import find_env
from megastep.rollout.stream import GroupStream
from megastep.rollout.task import Task
from megastep.trainer.learner import Learner
from megastep.trainer.loop import Loop
from megastep.trainer.rundir import Run
from megastep.types import Group

SPEEDUP_BAR = 2.0
BOUND_SHARE_BAR = 0.85
MEAN_S = 0.5
TAIL = 10.0  # 99th percentile / mean
MAX_STALENESS = 8
STEPS = {"synchronous": 8, "asynchronous": 30}
# exp(m + s²/2) = mean and exp(m + 2.326 s) = tail × mean
SIGMA = 2.326 - math.sqrt(2.326**2 - 2 * math.log(TAIL))
MU = math.log(MEAN_S) - SIGMA**2 / 2


class Slow(Chase):
    """Chase with latency."""

    seen: Counter[str] = Counter()  # episodes per prompt

    def __init__(self, row):
        super().__init__(row)
        prompt = json.dumps(row)
        self.random = random.Random(f"{prompt}/{self.seen[prompt]}")
        self.seen[prompt] += 1

    async def step(self, text, ids):
        await asyncio.sleep(self.random.lognormvariate(MU, SIGMA))
        return await super().step(text, ids)


def environment() -> type[Slow]:
    """The class that configs name; differs from `Slow` above if this file is __main__."""
    return find_env(f"{Path(__file__).stem}:Slow")


def make_config(folder: str, max_staleness: float, steps: int) -> Config:
    config = load(
        "configs/chase.yaml",
        [
            f"run.dir={folder}",
            "run.wandb=disabled",
            "warm_start.trajectories=0",
            "rollout.prompts=16",
            "rollout.samples_per_prompt=4",
            "rollout.concurrency=32",
            "train.mini_batch_prompts=16",
            "eval.prompts=1",
            "eval.samples_per_prompt=1",
            f"async.max_staleness={max_staleness}",
            f"train.steps={steps}",
            "checkpoint.every_steps=0",
            "checkpoint.every_minutes=0",
            "run.rollouts_every=0",
        ],
    )
    config.env.name = f"{Path(__file__).stem}:Slow"
    return config


def per_second(config: Config, seconds: list[float]) -> float:
    return config.rollout.prompts * config.rollout.samples_per_prompt * len(seconds) / sum(seconds)


def whole_loop(name: str, config: Config, cluster: Cluster) -> float:
    environment().seen.clear()
    config.run.name = name
    run = Run.find(config, name)
    run.create(config)
    with MetricsLog(run.folder, run.last_row, "disabled", {}) as log:
        Loop(config, Task.load(config), cluster, run, log).run([])
    edge = 1 + math.ceil(config.asynchronous.max_staleness)
    rows = read_metrics(run.folder)[1:][edge:-edge]
    assert max(row["staleness/max"] for row in rows) <= config.asynchronous.max_staleness
    return per_second(config, [row["time/step_s"] - row.get("time/eval_s", 0) for row in rows])


def rollout_alone(config: Config, cluster: Cluster) -> tuple[float, list[list[Group]]]:
    environment().seen.clear()
    task = Task.load(config)
    seconds: list[float] = []
    batches: list[list[Group]] = []
    steps = config.train.steps
    edge = 1 + MAX_STALENESS
    pool = task.pool(cluster.engines.generate)
    # ahead=steps: rollouts never wait for training.
    with GroupStream(pool, task.stream(), config.rollout.prompts, steps, ahead=steps) as stream:
        for step in range(steps - edge):
            begun = time.perf_counter()
            batches.append(stream.take(step).groups)
            seconds.append(time.perf_counter() - begun)
    return per_second(config, seconds[edge:]), batches


def training_alone(config: Config, cluster: Cluster, batches: list[list[Group]]) -> float:
    learner = Learner(config, cluster.policy)
    seconds: list[float] = []
    for groups in batches:
        begun = time.perf_counter()
        learner.learn(groups)
        cluster.sync()
        seconds.append(time.perf_counter() - begun)
    return per_second(config, seconds[2:])


def main() -> int:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # for find_env
    with tempfile.TemporaryDirectory() as folder:
        configs = {
            name: make_config(folder, MAX_STALENESS if name == "asynchronous" else 0, steps)
            for name, steps in STEPS.items()
        }
        with Cluster(configs["asynchronous"], log=Path(folder) / "log.txt") as cluster:
            found = {name: whole_loop(name, config, cluster) for name, config in configs.items()}
            found["rollout"], batches = rollout_alone(configs["asynchronous"], cluster)
            found["training"] = training_alone(configs["asynchronous"], cluster, batches)
    for name, speed in found.items():
        print(f"{name:<14}{speed:8.2f} trajectories/s")
    result = {
        "speedup": found["asynchronous"] / found["synchronous"],
        "bound_share": found["asynchronous"] / min(found["rollout"], found["training"]),
    }
    is_met = result["speedup"] >= SPEEDUP_BAR and result["bound_share"] >= BOUND_SHARE_BAR
    print("every bar is met" if is_met else f"a bar is missed: {SPEEDUP_BAR}, {BOUND_SHARE_BAR}")
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
