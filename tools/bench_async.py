"""What does it gain to play on while training works? An environment whose answers take long now and then.

    sleeps        log-normal before every answer of the environment: mean 0.5 s, the longest percent ten times that
    synchronous   async.max_staleness = 0: each batch waits for its slowest episode, training for the batch
    asynchronous  async.max_staleness = 8
    rollout       the same episodes, and nobody trains      } the two halves alone; no schedule of both can be faster
    training      the same batches, and nobody plays        } than the slower of them

Ray, a vLLM engine, one policy rank, chase with its tiny model and random weights: 16 prompts × 4 samples of up to 5
turns, 32 episodes at a time in every case. The sleeps of an episode follow from its prompt, so all cases have the same
ones. Trajectories per second of wall time, without the first and last steps of a run, where batches are begun ahead or
none are any more: about eight minutes in all.

What is lost to the bound is lost to the tail: an episode of 40 s holds a place, and once it is due, training. Fewer
batches ahead than the longest episodes take would show that, not how the two halves overlap.

    python tools/bench_async.py

The last line is JSON: {"speedup": asynchronous / synchronous, "bound_share": asynchronous / slower half}. Bars: 2.0 and
0.85. A missed bar is printed.
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

SPEEDUP, BOUND_SHARE = 2.0, 0.85
MEAN_S, TAIL, AHEAD = 0.5, 10.0, 8
STEPS = {"synchronous": 8, "asynchronous": 30}
# exp(m + s²/2) = mean and exp(m + 2.326 s) = tail × mean
SIGMA = 2.326 - math.sqrt(2.326**2 - 2 * math.log(TAIL))
MU = math.log(MEAN_S) - SIGMA**2 / 2


class Slow(Chase):
    """Takes its time."""

    seen = Counter()  # how many episodes each prompt has had

    def __init__(self, row):
        super().__init__(row)
        prompt = json.dumps(row)
        self.random = random.Random(f"{prompt}/{self.seen[prompt]}")
        self.seen[prompt] += 1

    async def step(self, text, ids):
        await asyncio.sleep(self.random.lognormvariate(MU, SIGMA))
        return await super().step(text, ids)


def environment() -> type[Slow]:
    """As the configs name it: another class than the one above, where this file is the program."""
    return find_env(f"{Path(__file__).stem}:Slow")


def make_config(folder: str, ahead: float, steps: int) -> Config:
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
            f"async.max_staleness={ahead}",
            f"train.steps={steps}",
            "checkpoint.every_steps=0",
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


def rollout_alone(config: Config, cluster: Cluster) -> tuple[float, list]:
    environment().seen.clear()
    task, seconds, batches = Task.load(config), [], []
    steps, edge = config.train.steps, 1 + AHEAD
    pool, prompts = task.pool(cluster.engines.generate), task.stream()
    with GroupStream(
        pool, prompts, config.rollout.prompts, steps, ahead=steps
    ) as stream:  # nobody is waited for
        for step in range(steps - edge):
            begun = time.perf_counter()
            batches.append(stream.take(step).groups)
            seconds.append(time.perf_counter() - begun)
    return per_second(config, seconds[edge:]), batches


def training_alone(config: Config, cluster: Cluster, batches: list) -> float:
    learner, seconds = Learner(config, cluster.policy), []
    for groups in batches:
        begun = time.perf_counter()
        learner.learn(groups)
        cluster.sync()
        seconds.append(time.perf_counter() - begun)
    return per_second(config, seconds[2:])


def main() -> int:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # where the environment is found
    with tempfile.TemporaryDirectory() as folder:
        configs = {
            name: make_config(folder, AHEAD if name == "asynchronous" else 0, steps)
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
    met = result["speedup"] >= SPEEDUP and result["bound_share"] >= BOUND_SHARE
    print("every bar is met" if met else f"a bar is missed: {SPEEDUP}, {BOUND_SHARE}")
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
