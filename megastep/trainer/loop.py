"""The training loop. `async.max_staleness` bounds how far rollouts run ahead; 0: synchronous.

    start     warm start on demonstrations (once) → weight sync → held-out evaluation
    step      rollout → filters → advantages, trie, packing → update → weight sync → evaluation
              → metrics → checkpoint
    SIGTERM   the update in progress finishes, a rollout in progress does not; then checkpoint
    lost rank all ranks are replaced, and another `Loop` continues from the newest checkpoint

`Loop.run` and `Loop.advance` read in that order. Synchronous: a step's rollout starts when the step
does. Asynchronous: it started earlier and continues during updates and weight syncs, like
evaluation (rollout/stream.py). The run directory holds the results (trainer/rundir.py); metrics are
documented in report/meanings.py.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path

from megastep import signals
from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import latest
from megastep.cluster import Cluster
from megastep.config import Config, group_problems, training_problems
from megastep.console import (
    Clock,
    LiveLine,
    RolloutProgress,
    run_summary,
    supervised_progress,
)
from megastep.errors import ConfigError, RunFailed, RunLost
from megastep.report.metrics_log import MetricsLog, read_metrics
from megastep.report.run_report import write_report
from megastep.rollout.keeper import write_rollouts
from megastep.rollout.pool import check_not_all_failed
from megastep.rollout.stream import GroupStream, Interrupted, StreamState
from megastep.rollout.task import Task
from megastep.samples import filters, store
from megastep.samples.metrics import (
    count_trajectories,
    filter_metrics,
    rollout_metrics,
    sampled_tokens,
    succeeded,
)
from megastep.samples.routing import routing_of_groups, tables_of
from megastep.samples.staleness import StalenessTracker
from megastep.trainer.evaluation import Evaluation
from megastep.trainer.learner import Learner, load_policy, print_warnings
from megastep.trainer.rundir import Run
from megastep.types import Group


def train(config: Config, name: str) -> Path:
    """Run the configured job, or the rest of it; returns the run directory."""
    problems = training_problems(config) or group_problems(config)
    if problems:
        raise ConfigError(problems)
    print_warnings(config)
    task = Task.load(config)
    task.eval_prompts()  # a data set without held-out rows is an error now, not after the start
    run = Run.find(config, name)
    if run.state.step > 0 and run.state.position:
        task.stream().seek(run.state.position)  # other rows than the checkpoint's are an error
    if run.state.step >= config.train.steps:
        print(f"{run.folder}: has its {run.state.step} steps; raise train.steps to continue")
        return run.folder
    demonstrations = [] if run.checkpoint else task.demonstrations()
    run.create(config)
    signals.advise(run.resume_hint)
    start = f"continues {run.where_it_begins}" if run.checkpoint else "a new run"
    print(f"{run.folder}: {start}")
    print(
        f"starting {config.policy.ranks} rank(s) and {config.engine.num_engines} engine(s); "
        f"logs: {run.log}"
    )
    with MetricsLog.of_run(run.folder, run.last_row, config) as log:
        with Cluster(config, log=run.log) as cluster:
            run_to_the_end(config, task, cluster, run, log, demonstrations)
    print(run_summary(read_metrics(run.folder)))
    print(next_commands(run))
    return run.folder


def run_to_the_end(
    config: Config,
    task: Task,
    cluster: Cluster,
    run: Run,
    log: MetricsLog,
    demonstrations: list[Group],
) -> None:
    """Run the loop. When ranks or recorded routing are lost, new ranks continue, as a resumed
    process would.

    What happened since the newest checkpoint is undone: running episodes are cancelled, groups and
    rows of metrics dropped, engines get the checkpoint's weights. Its prompts are generated again.
    """
    restarts = Restarts(config.train.restarts)
    while True:
        try:
            if restarts.used:
                cluster.restart_policy()
            loop = Loop(config, task, cluster, run, log)
            return loop.run([] if run.checkpoint else demonstrations)
        except RunLost as lost:
            newest = run.at_newest(config)
            restarts.use(lost, is_newer=newest.state.step > run.state.step)
            run = newest
            log.rewind(run.last_row)
            print(f"{lost}; new ranks continue {run.where_it_begins} ({restarts})")


class Restarts:
    """At most `limit` in a row; every newer checkpoint allows as many again."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0

    def use(self, lost: RunLost, is_newer: bool) -> None:
        """Raises if none is left. is_newer: a checkpoint was saved since the last restart."""
        if is_newer:
            self.used = 0
        if self.used == self.limit:
            raise type(lost)(f"{lost}; {self}") from None
        self.used += 1

    def __str__(self) -> str:
        return f"{self.used} of train.restarts = {self.limit} since the newest checkpoint"


def next_commands(run: Run) -> str:
    """Where the results are, and how to export them."""
    saved = latest(run.checkpoints)
    command = os.path.relpath(Path(sys.executable).with_name("megastep"))
    return "\n".join(
        [
            f"metrics: {run.folder}/metrics.jsonl, checkpoint: {saved}",
            f"export to Hugging Face: {command} export {saved} HF_FOLDER",
            "report: " + ", ".join(map(str, write_report(run.folder))),
        ]
    )


class Loop:
    stream_type: type[GroupStream] = GroupStream

    def __init__(self, config: Config, task: Task, cluster: Cluster, run: Run, log: MetricsLog):
        self.config = config
        self.cluster = cluster
        self.rundir = run
        self.log = log
        self.step = run.state.step
        self.saved_step = run.state.step
        self.saved_at = time.monotonic()
        self.stops = False
        self.staleness = StalenessTracker(run.state.synced_versions)
        self.stream = self.stream_type(
            cluster.pool(task.pool(cluster.engines.generate)),
            task.stream(),
            config.rollout.prompts,
            config.train.steps,
            config.asynchronous.max_staleness,
            config.asynchronous.on_stale,
        )
        eval_pool = cluster.pool(task.eval_pool(cluster.engines.generate))
        self.evaluation = Evaluation(self.stream, eval_pool, task.eval_prompts())
        self.clock = Clock()
        self.line = LiveLine(config.train.steps, self.step)
        self.learner = Learner(config, cluster.policy, on_message=self.line.print)

    def run(self, demonstrations: list[Group]) -> None:
        with self.line, self.stream:
            self.begin(demonstrations)
            with signals.asks(self.ask_to_stop):
                try:
                    while self.step < self.config.train.steps and not self.stops:
                        self.advance()
                    self.finish()
                except RunLost as lost:
                    if not self.stops:
                        raise
                    raise signals.Stopped(f"stopped in step {self.step}; {lost}") from None

    def advance(self) -> None:
        """One training step; none if the run is asked to stop before its groups are complete."""
        self.clock.restart()
        self.step += 1
        try:
            groups, metrics = self.collect()
        except Interrupted:
            self.step -= 1
            return
        self.cluster.to_policy()
        self.seal()
        metrics |= self.learner.learn(groups)
        with self.clock("time/sync_s"):
            metrics["rollout/version"] = self.sync()
        metrics |= self.evaluate()
        metrics = self.clock.seconds() | metrics
        self.log.write(self.step, metrics)
        self.line.show(metrics)
        if self.is_checkpoint_due():
            self.save(self.rundir.checkpoints)

    def ask_to_stop(self) -> None:
        """Called by a signal: end with a checkpoint; do not wait for rollouts or evaluations."""
        self.stops = True
        self.stream.interrupt()

    def finish(self) -> None:
        """A checkpoint of the last training step, if there was one."""
        if self.step > 0 and self.saved_step != self.step:
            self.save(self.rundir.checkpoints)
        self.cluster.policy.finish_saving()
        if self.step < self.config.train.steps:
            raise signals.Stopped(f"stopped after step {self.step}")

    # ------------------------------------------------------------ start

    def begin(self, demonstrations: list[Group]) -> None:
        """The engines get the checkpoint's weights, or fresh ones, warm-started and evaluated."""
        self.cluster.to_policy()
        load_policy(self.rundir, self.learner)
        if self.step > 0:
            self.sync()
            self.restore()
            return
        metrics: dict[str, float] = {}
        if demonstrations:
            steps = self.config.warm_start.optimizer_steps(len(demonstrations))
            with supervised_progress("warm start", steps) as on_step:
                metrics |= self.learner.warm_start(demonstrations, on_step)
        if demonstrations or self.rundir.comes_from_another:
            self.save(self.rundir.start)
        self.sync()
        metrics |= self.first_evaluation()
        self.log.write(0, metrics)

    def restore(self) -> None:
        """Rollouts and the evaluation that the checkpoint interrupted."""
        state = self.rundir.state
        self.stream.restore(
            self.step,
            StreamState(state.position, state.unfinished, state.ready, state.ready_begun),
        )
        if state.evaluates:
            self.evaluation.begin(self.step)
            # Synchronous: the evaluation is of these weights, so it ends before they change.
            while self.stream.ahead == 0 and not self.evaluation.is_done(wait_s=0.1):
                self.cluster.policy.check()

    def first_evaluation(self) -> dict[str, float]:
        total = len(self.evaluation.prompts) * self.config.eval.samples_per_prompt
        with RolloutProgress(total, "held-out evaluation") as bar:
            self.evaluation.begin(0, lambda t: bar.add(sampled_tokens(t), succeeded(t)))
            return self.wait_for_evaluation()

    def sync(self) -> int:
        """Weight sync; returns the weight version."""
        version = self.cluster.sync()
        self.staleness.record_sync(version)
        return version

    # ------------------------------------------------------------ rollout

    def collect(self) -> tuple[list[Group], dict[str, float]]:
        """Rollout and filters: the groups to train on, and metrics of all groups."""
        kept: list[Group] = []
        groups: list[Group] = []
        dropped: list[filters.Dropped] = []
        counts: Counter[str] = Counter()
        wanted = self.config.rollout.prompts
        while wanted:
            with self.clock("time/rollout_s"):
                more = wanted if groups else None
                taken = self.stream.take(self.step - 1, more, meanwhile=self.watch)
            groups += taken.groups
            check_not_all_failed(groups)
            fresh, stale = self.staleness.drop_stale(taken.groups, self.stream.staleness_limit)
            passed, filtered = filters.apply(fresh, self.config)
            kept += passed
            dropped += filtered + stale
            counts.update({"async/waited": taken.waited, "async/dropped": taken.dropped})
            wanted = self.missing_groups(kept, groups)
        self.keep_rollouts(groups)
        metrics = rollout_metrics(groups) | dict(counts)
        metrics |= filter_metrics(dropped, count_trajectories(groups))
        metrics |= self.staleness.metrics(kept, self.stream.staleness_limit)
        metrics |= self.cluster.metrics()
        return kept, metrics | self.stream.metrics()

    def keep_rollouts(self, groups: list[Group]) -> None:
        """Rollout files: all groups every `run.rollouts_every` steps, a few for the report."""
        settings = self.config.run
        if settings.rollouts_every and self.is_due(settings.rollouts_every):
            write_rollouts(self.rundir.rollouts(self.step), groups)
        if settings.report_prompts:
            shown = store.without_routing(groups[: settings.report_prompts])
            store.write(self.rundir.latest_rollouts, shown)

    def missing_groups(self, kept: list[Group], groups: list[Group]) -> int:
        """Dynamic sampling: the groups to generate in place of those that were dropped."""
        prompts = self.config.rollout.prompts
        settings = self.config.filters
        missing = prompts - len(kept) if settings.dynamic_sampling else 0
        if missing and len(groups) >= settings.max_batches * prompts:
            raise RunFailed(
                f"filters.max_batches = {settings.max_batches}: of {len(groups)} prompts "
                f"{len(kept)} had an advantage other than 0, {prompts} are needed; the task is too "
                "easy or too hard, or the limit too low"
            )
        return missing

    # ------------------------------------------------------------ evaluation

    def evaluate(self) -> dict[str, float]:
        """Metrics of a finished evaluation, if there is one; starts the next one if it is due.

        Training waits where it must: synchronous; before the next evaluation; at the end, where the
        last step has an evaluation of its own.
        """
        metrics: dict[str, float] = {}
        steps_left = self.config.train.steps - self.step
        if self.is_due(self.config.train.eval_every):
            metrics |= self.wait_for_evaluation()
            self.evaluation.begin(self.step)
        if self.stream.ahead == 0 or steps_left <= 1 or self.evaluation.is_done():
            metrics |= self.wait_for_evaluation()
        return metrics

    def wait_for_evaluation(self) -> dict[str, float]:
        """Empty if the run is asked to stop meanwhile: the evaluation then runs after a resume."""
        if not self.evaluation.is_running:
            return {}
        with self.clock("time/eval_s"):
            while not self.evaluation.is_done(wait_s=0.1):
                self.cluster.policy.check()
                if self.stops and self.step < self.config.train.steps:
                    return {}
            return self.evaluation.result()

    # ------------------------------------------------------------ checkpoints

    def is_checkpoint_due(self) -> bool:
        settings = self.config.checkpoint
        minutes = (time.monotonic() - self.saved_at) / 60
        is_late = settings.every_minutes > 0 and minutes >= settings.every_minutes
        return is_late or self.is_due(settings.every_steps)

    def save(self, root: Path) -> None:
        state = LoopState(
            self.step,
            **vars(self.stream.state()),
            synced_versions=self.staleness.synced_versions,
            evaluates=self.evaluation.is_running,
        )
        if tables_of(routing_of_groups(state.ready)):
            root.mkdir(parents=True, exist_ok=True)
            state.write_ready(root, write_rollouts)
        self.cluster.policy.save(root, state)
        self.saved_step = self.step
        self.saved_at = time.monotonic()

    def watch(self) -> None:
        """During a rollout, which may be waiting for an engine that waits for the policy."""
        self.cluster.policy.check()
        self.seal()

    def seal(self) -> None:
        """Publish a background checkpoint as soon as its files are complete."""
        if self.config.checkpoint.asynchronous:
            self.cluster.policy.seal_written()

    def is_due(self, every: int) -> bool:
        """After the last training step, and after each `every` of them."""
        return self.step == self.config.train.steps or bool(every and self.step % every == 0)
