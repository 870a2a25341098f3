"""`megastep train --rollouts FILE`: training on saved rollouts, without engines.

The prompts of the file, `rollout.prompts` at a time; each batch is a training step.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import latest
from megastep.cluster import Cluster
from megastep.config import Config, training_problems
from megastep.console import progress
from megastep.errors import ConfigError, RolloutError, StoreError
from megastep.report.metrics_log import MetricsLog
from megastep.rollout.task import check_teacher
from megastep.samples import filters, store
from megastep.samples.metrics import count_trajectories, filter_metrics, rollout_metrics
from megastep.samples.packing import check_lengths, mini_batches
from megastep.samples.validation import model_limits, validate
from megastep.trainer.learner import Learner, load_policy, print_warnings
from megastep.trainer.rundir import Run
from megastep.types import Group


@dataclass
class Batch:
    """A training step's groups: all of them, those that pass the filters, and what was dropped."""

    groups: list[Group]
    kept: list[Group]
    dropped: list[filters.Dropped]
    informative: int  # kept groups with an advantage other than 0


def train_on_rollouts(config: Config, name: str, rollouts: Path) -> Path:
    problems = training_problems(config)
    if problems:
        raise ConfigError(problems)
    check_teacher(config)
    batches = read_batches(config, rollouts)
    print_warnings(config)
    run = Run.find(config, name)
    run.create(config)
    step = run.state.step
    with MetricsLog.of_run(run.folder, run.last_row, config) as log:
        with Cluster(config, with_engines=False, log=run.log) as cluster:
            learner = Learner(config, cluster.policy)
            load_policy(run, learner)
            with progress("train", len(batches), "step") as bar:
                for batch in batches:
                    step += 1
                    metrics = rollout_metrics(batch.groups)
                    metrics |= filter_metrics(batch.dropped, count_trajectories(batch.groups))
                    metrics |= learner.learn(batch.kept)
                    log.write(step, metrics)
                    bar.update()
            cluster.policy.save(run.checkpoints, LoopState(step))
            cluster.policy.finish_saving()
    print(f"metrics: {run.folder}/metrics.jsonl, checkpoint: {latest(run.checkpoints)}")
    return run.folder


def read_batches(config: Config, path: Path) -> list[Batch]:
    """Raises StoreError if the file does not fit the model or the estimator, or trains nothing."""
    batches = []
    for groups in mini_batches(store.read(path), config.rollout.prompts):
        try:
            kept, dropped = filters.apply(groups, config)
            informative, _ = filters.zero_variance(kept, **asdict(config.advantage))
            check_lengths(kept, config.budget_tokens, config.policy.align_tokens)
        except ValueError as error:
            raise StoreError(f"{path}: {error}") from None
        batches.append(Batch(groups, kept, dropped, len(informative)))
    _check_trainable(config, path, batches)
    return batches


def _check_trainable(config: Config, path: Path, batches: list[Batch]) -> None:
    kept = [group for batch in batches for group in batch.kept]
    if not kept:
        reasons = [dropped.reason for batch in batches for dropped in batch.dropped]
        found = "no trajectories"
        if reasons:
            found = f"all {len(reasons)} trajectories are dropped, the first: {reasons[0]}"
        raise StoreError(f"{path}: nothing to train on: {found}")
    try:
        validate(kept, *model_limits(config))
    except RolloutError as error:
        raise StoreError(f"{path}: not of {config.model.path}: {error.summary()}") from None
    if not config.loss.uses_rewards:
        return
    _check_sampling(config, path, kept)
    informative = sum(batch.informative for batch in batches)
    reason = f"under advantage.estimator = {config.advantage.estimator} all advantages are 0"
    if not informative:
        raise StoreError(
            f"{path}: nothing to learn from its {len(kept)} prompts: {reason}; several "
            "trajectories of different reward per prompt are needed"
        )
    if informative < len(kept):
        degenerate = len(kept) - informative
        print(f"{path}: {degenerate} of {len(kept)} prompts train nothing: {reason}")


def _check_sampling(config: Config, path: Path, groups: list[Group]) -> None:
    """The ratio of logprobs of two distributions, such as with and without top_p, is not 1 on
    policy."""
    for trajectory in (t for group in groups for t in group.trajectories):
        sampling = trajectory.sampling or {}
        for name in ("temperature", "top_p", "top_k"):
            ours = getattr(config.rollout, name)
            found = sampling.get(name, ours)
            if found != ours:
                raise StoreError(
                    f"{path}: sampled with {name} {found!s:.20}, which rollout.{name} = {ours:g} "
                    "does not allow: the logprobs of rollout and trainer must be of one "
                    "distribution"
                )
