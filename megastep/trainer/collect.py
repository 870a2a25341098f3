"""`megastep rollout` and `megastep eval`: generation without training.

The weights are those of `model.path`, random ones (`model.init: random`), or those of a checkpoint
(`run.name`, `run.resume`). The latter two are loaded by a policy, which syncs them to the engines.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from megastep import signals
from megastep.cluster import Cluster
from megastep.config import Config
from megastep.console import RolloutProgress, rollout_summary
from megastep.errors import CheckpointError, OutputError, RunDirError
from megastep.report.run_report import write_report
from megastep.rollout.data import Prompt
from megastep.rollout.generation import Generate
from megastep.rollout.keeper import write_rollouts
from megastep.rollout.pool import Pool, check_not_all_failed
from megastep.rollout.task import Task
from megastep.samples.metrics import (
    evaluation_metrics,
    rollout_metrics,
    sampled_tokens,
    succeeded,
)
from megastep.trainer.rundir import check_weights_fit, where_to_resume, write_config
from megastep.types import Group, Trajectory


def writable_log(out: Path, option: str = "--out") -> Path:
    """The log next to `out`; both are checked to be writable."""
    try:
        if not out.parent.is_dir() or out.is_dir():
            raise OutputError(f"{option} {out}: must be a file in a folder that is there")
        log = out.with_name(f"{out.name}.log")
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=log.name):
            if log.exists():
                log.open("ab").close()
    except OSError as error:
        raise OutputError(
            f"{option} {str(out)[:200]}: cannot be written ({error.strerror})"
        ) from None
    except OutputError:
        raise
    except ValueError:  # a NUL
        raise OutputError(f"{option} {str(out)[:200]!r}: is not a file name") from None
    return log


def rollout(config: Config, out: Path) -> list[Group]:
    """Write `rollout.samples_per_prompt` trajectories of `rollout.prompts` prompts to a file."""
    log = writable_log(out)
    checkpoint = checkpoint_of(config)
    task = Task.load(config)
    prompts = task.stream().take(config.rollout.prompts)
    groups, speed = _generate(config, checkpoint, task.pool, prompts, log, out)
    print(rollout_summary(rollout_metrics(groups), speed))
    print(f"{out}: written; report: megastep view {out} --model {config.model.path}")
    return groups


def evaluate(config: Config, name: str) -> dict[str, float]:
    """Evaluate `eval.prompts` held-out prompts; metrics and trajectories go to a new folder."""
    checkpoint = checkpoint_of(config)
    task = Task.load(config)
    prompts = task.eval_prompts()
    folder = (
        Path(config.run.dir) / f"{config.run.name or name}-eval-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    try:
        folder.mkdir(parents=True)
        write_config(folder, config)
    except OSError as error:
        raise RunDirError(f"{folder}: cannot be written ({error.strerror})") from None
    out = folder / "rollouts.safetensors"
    groups, speed = _generate(config, checkpoint, task.eval_pool, prompts, folder / "log.txt", out)
    metrics = evaluation_metrics(groups)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(rollout_summary(rollout_metrics(groups), speed))
    print(f"{folder}: metrics.json, rollouts.safetensors")
    print("report: " + ", ".join(map(str, write_report(folder))))
    return metrics


def checkpoint_of(config: Config) -> Path | None:
    """The configured checkpoint; None: the weights of `model.path`, or random ones."""
    found = None
    if config.run.name is not None or config.run.resume not in ("auto", "never"):
        found = where_to_resume(
            config, Path(config.run.dir) / str(config.run.name), config.run.resume
        )
        if found is None and config.run.name is not None:
            raise CheckpointError(
                f"run.name = {config.run.name}: there is no checkpoint in {config.run.dir}"
            )
    if found is None:
        check_weights_fit(config)
    return found


def _generate(
    config: Config,
    checkpoint: Path | None,
    make_pool: Callable[[Generate], Pool],
    prompts: list[Prompt],
    log: Path,
    out: Path,
) -> tuple[list[Group], float]:
    """Write the groups to `out`; returns them, and the sampled tokens per second."""
    with_policy = checkpoint is not None or config.model.init == "random"
    if config.loss.teacher is not None:  # used in training only
        config = replace(config, loss=replace(config.loss, type="nll", teacher=None))
    print(f"starting {config.engine.num_engines} engine(s); logs: {log}", flush=True)
    with Cluster(config, with_policy=with_policy, log=log) as cluster:
        if checkpoint is not None:
            cluster.policy.load(checkpoint)
            cluster.sync()
        pool = cluster.pool(make_pool(cluster.engines.generate))
        with RolloutProgress(len(prompts) * pool.samples_per_prompt, file=sys.stderr) as bar:

            def on_trajectory(trajectory: Trajectory) -> None:
                bar.add(sampled_tokens(trajectory), succeeded(trajectory))

            groups = _run(pool.run(prompts, on_trajectory))
            tokens_per_s = bar.tokens_per_s
        check_not_all_failed(groups)
        write_rollouts(out, groups)
    return groups, tokens_per_s


def _run(work: Coroutine) -> Any:
    """The result of `work`, or Stopped after SIGTERM.

    The main task returns None: asyncio.run puts SIGINT's handler back, for which `signal` formats
    the one that it replaces, and with it the result of the main task.
    """
    results = []

    async def keep_result() -> None:
        results.append(await _stoppable(work))

    asyncio.run(keep_result())
    return results[0]


async def _stoppable(work: Coroutine) -> Any:
    """The result of `work`; SIGTERM cancels all of it, not the episode in which it arrives."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)

    with signals.asks(cancel):
        try:
            return await task
        except asyncio.CancelledError:
            raise signals.Stopped("stopped; nothing was written") from None
