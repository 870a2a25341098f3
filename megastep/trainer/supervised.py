"""`megastep sft CONFIG`: the warm start alone, without engines.

The result is `start/step_0` of the run directory, with metrics in `sft/`. The same config and
`run.name` continue with RL from there; other configs take it by `run.resume`. An interrupted stage
starts from its beginning.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import latest
from megastep.cluster import Cluster
from megastep.config import Config
from megastep.console import supervised_progress
from megastep.errors import ConfigError
from megastep.report.metrics_log import MetricsLog
from megastep.rollout.renderer import Renderer
from megastep.rollout.task import Task, check_vocabulary, conversations
from megastep.trainer.learner import Learner, load_policy
from megastep.trainer.rundir import Run
from megastep.types import Group


def train_supervised(config: Config, name: str) -> Path:
    """Returns the run directory."""
    config = replace(config, loss=replace(config.loss, type="nll", teacher=None))
    demonstrations = load_demonstrations(config)
    run = Run.find(config, name)
    if latest(run.start) or latest(run.checkpoints):
        raise ConfigError(f"run.name = {run.folder.name}: is trained already; give another name")
    run.create(config)
    metrics = run.folder / "sft"
    metrics.mkdir(exist_ok=True)
    print(f"{run.folder}: {len(demonstrations)} demonstrations; logs: {run.log}")
    with MetricsLog.of_run(metrics, -1, config) as log:
        with Cluster(config, with_engines=False, log=run.log) as cluster:
            learner = Learner(config, cluster.policy)
            load_policy(run, learner)
            _train(learner, demonstrations, log)
            cluster.policy.save(run.start, LoopState(0))
            cluster.policy.finish_saving()
    saved = latest(run.start)
    command = os.path.relpath(Path(sys.executable).with_name("megastep"))
    print(f"metrics: {metrics}/metrics.jsonl, checkpoint: {saved}")
    print(f"export to Hugging Face: {command} export {saved} HF_FOLDER")
    return run.folder


def load_demonstrations(config: Config) -> list[Group]:
    """Of `warm_start.data`, which needs no environment, or of the environment."""
    settings = config.warm_start
    if settings.data is None and settings.trajectories == 0:
        raise ConfigError("warm_start.data: must be given, or warm_start.trajectories")
    if settings.data is None:
        return Task.load(config).demonstrations()
    renderer = Renderer.for_model(config.model.path, config.rollout.mode, config.rollout.template)
    check_vocabulary(renderer, config)
    return conversations(config, renderer)


def _train(learner: Learner, demonstrations: list[Group], log: MetricsLog) -> None:
    steps = learner.config.warm_start.optimizer_steps(len(demonstrations))
    step = 0
    with supervised_progress("sft", steps) as show:

        def on_step(metrics: dict[str, float]) -> None:
            nonlocal step
            step += 1
            log.write(step, metrics)
            show(metrics)

        learner.warm_start(demonstrations, on_step)
