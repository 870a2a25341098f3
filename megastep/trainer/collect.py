"""`megastep rollout` and `megastep eval`: engines and agents, nothing is trained.

The weights are those of `model.path`; with `model.init: random` fresh ones, and with `run.name` or `run.resume` those
of a checkpoint. The latter two live in a policy first, which hands them to the engines.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megastep import signals
from megastep.cluster import Cluster
from megastep.config import Config
from megastep.console import progress
from megastep.errors import CheckpointError, OutputError, RunDirError
from megastep.report.writing import write_report
from megastep.rollout.data import Prompt
from megastep.rollout.generation import Generate
from megastep.rollout.pool import Pool, check_not_all_failed
from megastep.rollout.task import Task
from megastep.samples import store
from megastep.samples.metrics import evaluation_metrics, rollout_metrics, succeeded
from megastep.trainer.rundir import check_weights_fit, where_to_resume, write_config
from megastep.types import Group, Trajectory


def _writable_log(out: Path) -> Path:
    """Beside `out`. Both can be written: `out` is written beside and renamed, a log that is there is opened."""
    try:
        if not out.parent.is_dir() or out.is_dir():
            raise OutputError(f"--out {out}: must be a file in a folder that is there")
        log = out.with_name(f"{out.name}.log")
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=log.name):
            if log.exists():
                log.open("ab").close()
    except OSError as error:
        raise OutputError(f"--out {str(out)[:200]}: cannot be written ({error.strerror})") from None
    except OutputError:
        raise
    except ValueError:  # a NUL
        raise OutputError(f"--out {str(out)[:200]!r}: is not a file name") from None
    return log


def rollout(config: Config, out: Path) -> list[Group]:
    """`rollout.prompts` prompts of the training data, `rollout.samples_per_prompt` trajectories each, into a file."""
    log = _writable_log(out)
    checkpoint = _checkpoint(config)
    task = Task.load(config)
    prompts = task.stream().take(config.rollout.prompts)
    groups, speed = _play(config, checkpoint, task.pool, prompts, log)
    store.write(out, groups)
    print(_summary(rollout_metrics(groups), speed))
    print(f"{out}: written; to look at: megastep view {out} --model {config.model.path}")
    return groups


def evaluate(config: Config, name: str) -> dict[str, float]:
    """`eval.prompts` held-out prompts, `eval.samples_per_prompt` trajectories each; metrics and trajectories into a folder."""
    checkpoint = _checkpoint(config)
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
    groups, speed = _play(config, checkpoint, task.eval_pool, prompts, folder / "log.txt")
    store.write(folder / "rollouts.safetensors", groups)
    metrics = evaluation_metrics(groups)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(_summary(rollout_metrics(groups), speed))
    print(f"{folder}: metrics.json, rollouts.safetensors")
    print("report: " + ", ".join(map(str, write_report(folder))))
    return metrics


def _checkpoint(config: Config) -> Path | None:
    """The checkpoint whose weights are asked for; None: those of `model.path`, which are there, or random ones."""
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


def _play(
    config: Config,
    checkpoint: Path | None,
    make_pool: Callable[[Generate], Pool],
    prompts: list[Prompt],
    log: Path,
) -> tuple[list[Group], float]:
    """The groups, and tokens sampled per second."""
    with_policy = checkpoint is not None or config.model.init == "random"
    print(f"starting {config.engine.num_engines} engine(s); what they say is in {log}", flush=True)
    with Cluster(config, with_policy=with_policy, log=log) as cluster:
        if checkpoint is not None:
            cluster.policy.call("load", checkpoint)
            cluster.sync()
        pool = make_pool(cluster.engines.generate)
        with Progress(len(prompts) * pool.samples_per_prompt) as progress:
            groups = asyncio.run(_stoppable(pool.run(prompts, progress.add)))
            tokens_per_s = progress.tokens_per_s
    check_not_all_failed(groups)
    return groups, tokens_per_s


async def _stoppable(work: Coroutine) -> Any:
    """The result of `work`. SIGTERM cancels it: raised in an episode, `Stopped` would be that episode's alone."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    with signals.asks(lambda: loop.call_soon_threadsafe(task.cancel)):
        try:
            return await task
        except asyncio.CancelledError:
            raise signals.Stopped("stopped; nothing was written") from None


# ---------------------------------------------------------------- what the user sees


@dataclass
class Progress:
    """A bar over trajectories with tokens per second and the share that succeeded so far."""

    total: int
    tokens: int = 0
    ended: int = 0
    successes: int = 0
    begun: float = field(default_factory=time.monotonic)

    def __enter__(self) -> "Progress":
        self.bar = progress("rollout", self.total, "traj", file=sys.stderr)
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def add(self, trajectory: Trajectory) -> None:
        self.ended += 1
        self.tokens += sum(int(step.loss_mask.sum()) for step in trajectory.steps)
        self.successes += succeeded(trajectory)
        success = self.successes / self.ended
        self.bar.set_postfix_str(
            f"{self.tokens_per_s:.0f} tokens/s, success {success:.2f}", refresh=False
        )
        self.bar.update()

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(time.monotonic() - self.begun, 1e-9)


def _summary(metrics: dict[str, float], tokens_per_s: float) -> str:
    passes = [
        (name.removeprefix("reward/pass_at_"), value)
        for name, value in metrics.items()
        if "pass_at_" in name
    ]
    stops = [
        (name.removeprefix("rollout/stop_"), value)
        for name, value in metrics.items()
        if "rollout/stop_" in name
    ]
    lines = {
        "trajectories": f"{metrics['rollout/trajectories']} of {metrics['rollout/prompts']} prompts, "
        f"{tokens_per_s:.0f} tokens/s",
        "success": f"{metrics['reward/success']:.3f}",
        "pass@k": ", ".join(f"{k}: {value:.3f}" for k, value in passes),
        "reward": f"{metrics['reward/mean']:.3f} ± {metrics['reward/std']:.3f}",
        "turns": f"{metrics['rollout/turns_mean']:.2f}, at most {metrics['rollout/turns_max']}",
        "response tokens": f"{metrics['rollout/response_tokens_mean']:.1f} per trajectory",
        "ended by": ", ".join(
            f"{reason} {share:.1%}" for reason, share in sorted(stops, key=lambda s: -s[1])
        ),
    }
    return "\n".join(f"{name:<16}{text}" for name, text in lines.items())
