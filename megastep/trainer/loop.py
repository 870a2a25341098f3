"""The loop. `async.max_staleness` is how far episodes may run ahead of training; 0: synchronous.

    start     warm start on demonstrations, once ── weights into the engines ── held-out evaluation
    step      rollout → filter → credit, fold and pack → update → weights into the engines → evaluate → log → save
    SIGTERM   the step that is trained is ended, one that still waits for its rollout is not; then save

`Loop.run` and `advance` read as that. Synchronous, a step's rollout is played when it is asked for; else it was begun
before and goes on during updates and pushes, as evaluation does (rollout/stream.py). `replay` is the same without
engines, on rollouts from a file. What a run has said and kept is in its directory (trainer/rundir.py); what each metric means
is said in report/meanings.py.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from megastep import signals
from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import latest
from megastep.cluster import Cluster
from megastep.config import Config, training_warnings
from megastep.console import progress, waiting
from megastep.errors import ConfigError, RolloutError, RunFailed
from megastep.report.writing import MetricsLog, read_metrics, write_report
from megastep.rollout.pool import Pool, check_not_all_failed
from megastep.rollout.stream import GroupStream, Interrupted, StreamState
from megastep.rollout.task import Task
from megastep.samples import filters, store
from megastep.samples.advantage import check_estimator
from megastep.samples.metrics import evaluation_metrics, filter_metrics, rollout_metrics
from megastep.samples.packing import check_lengths, mini_batches
from megastep.samples.staleness import StalenessTracker
from megastep.samples.validation import validate
from megastep.trainer.learner import Learner, model_limits
from megastep.trainer.rundir import Run
from megastep.types import Group


def train(config: Config, name: str) -> Path:
    """Run the configured job, or what is left of it, and return its run directory."""
    check_trainable(config)
    check_samples_per_prompt(config)
    print_warnings(config)
    task = Task.load(config)
    task.eval_prompts()  # refuses a data set without held-out rows now, not after the start
    run = Run.find(config, name)
    if run.state.step > 0 and run.state.position:
        task.stream().seek(run.state.position)  # refuses other rows
    if run.state.step >= config.train.steps:
        print(f"{run.folder}: has its {run.state.step} steps already; raise train.steps to go on")
        return run.folder
    demonstrations = [] if run.checkpoint else task.demonstrations()
    run.create(config)
    signals.advise(run.resume_hint)
    print(
        f"{run.folder}: "
        + (f"continues after step {run.state.step}" if run.checkpoint else "a new run")
    )
    print(
        f"starting {config.policy.ranks} rank(s) and {config.engine.num_engines} engine(s); what they say is in {run.log}"
    )
    with MetricsLog.of_run(run.folder, run.last_row, config) as log:
        with Cluster(config, log=run.log) as cluster:
            Loop(config, task, cluster, run, log).run(demonstrations)
    print(summary(run.folder))
    print("to look at: " + ", ".join(map(str, write_report(run.folder))))
    return run.folder


def replay(config: Config, name: str, rollouts: Path) -> Path:
    """The training half alone: a file's prompts, `rollout.prompts` at a time, each batch a step. No engine starts."""
    check_trainable(config)
    batches = read_batches(config, rollouts)
    print_warnings(config)
    run = Run.find(config, name)
    run.create(config)
    step = run.state.step
    with MetricsLog.of_run(run.folder, run.last_row, config) as log:
        with Cluster(config, with_engines=False, log=run.log) as cluster:
            learner = Learner(config, cluster.policy)
            load_policy(run, learner)
            with progress("replay", len(batches), "step") as bar:
                for batch, kept, dropped in batches:
                    step += 1
                    metrics = (
                        rollout_metrics(batch)
                        | filter_metrics(dropped, _count(batch))
                        | learner.learn(kept)
                    )
                    log.write(step, metrics)
                    bar.update()
            cluster.policy.call("save", run.checkpoints, LoopState(step))
            cluster.policy.call("finish_saving")
    print(f"metrics: {run.folder}/metrics.jsonl, checkpoint: {latest(run.checkpoints)}")
    return run.folder


def read_batches(
    config: Config, path: Path
) -> list[tuple[list[Group], list[Group], list[filters.Dropped]]]:
    """The batches of a rollout file, and of each what is trained on and what is dropped. Raises StoreError where the
    file does not fit the configured model or estimator, or where nothing in it can be learned from."""
    batches = []
    for batch in mini_batches(store.read(path), config.rollout.prompts):
        try:
            kept, dropped = sift(batch, config)
            teaching, _ = filters.zero_variance(kept, **asdict(config.advantage))
            check_lengths(kept, config.budget_tokens, config.policy.parallel.tensor)
        except ValueError as error:
            raise store.StoreError(f"{path}: {error}") from None
        batches.append((batch, kept, dropped, len(teaching)))
    kept = [group for _, left, _, _ in batches for group in left]
    if not kept:
        why = [gone.reason for _, _, dropped, _ in batches for gone in dropped]
        told = (
            f"all {len(why)} trajectories are dropped, the first because of {why[0]}"
            if why
            else "no trajectories"
        )
        raise store.StoreError(f"{path}: nothing to train on: {told}")
    try:
        validate(kept, *model_limits(config))
    except RolloutError as error:
        raise store.StoreError(f"{path}: not of {config.model.path}: {error.summary()}") from None
    if config.loss.type != "nll":
        report_degenerate(config, path, kept, sum(teaching for *_, teaching in batches))
    return [batch for *batch, _ in batches]


def report_degenerate(config: Config, path: Path, groups: list[Group], teaching: int) -> None:
    """Prompts of a file that train nothing: all of them is an error."""
    why = f"under advantage.estimator = {config.advantage.estimator} all of their advantages are 0"
    if not teaching:
        raise store.StoreError(
            f"{path}: nothing to learn from its {len(groups)} prompts: {why}; several trajectories "
            "of different reward per prompt are needed"
        )
    if teaching < len(groups):
        print(
            f"{path}: nothing is learned from {len(groups) - teaching} of {len(groups)} prompts: {why}"
        )


def check_trainable(config: Config) -> None:
    """What rollouts and evaluation allow and training does not."""
    problems = []
    estimator, truncated, rollout = (
        config.advantage.estimator,
        config.filters.truncated,
        config.rollout,
    )
    wrong = check_estimator(estimator)
    if wrong:
        problems.append(f"advantage.estimator = {estimator}: {wrong}")
    if truncated not in filters.TRUNCATED_POLICIES:
        problems.append(
            f"filters.truncated = {truncated}: must be one of {', '.join(filters.TRUNCATED_POLICIES)}"
        )
    why = "training needs logprobs of the whole distribution that was sampled from"
    if rollout.temperature == 0:
        problems.append(f"rollout.temperature = 0: {why}; must be more than 0")
    if rollout.top_p < 1:
        problems.append(f"rollout.top_p = {rollout.top_p}: {why}; must be 1")
    if rollout.top_k > 0:
        problems.append(f"rollout.top_k = {rollout.top_k}: {why}; must be 0")
    if problems:
        raise ConfigError(problems)


def check_samples_per_prompt(config: Config) -> None:
    """Every estimator compares the trajectories of a prompt. gigpo also compares steps that began in one state, which
    one trajectory may visit twice; half of its advantage and most of its steps would be 0 all the same."""
    if config.rollout.samples_per_prompt < 2 and config.loss.type != "nll":
        raise ConfigError(
            [
                f"rollout.samples_per_prompt = {config.rollout.samples_per_prompt}: advantage.estimator = {config.advantage.estimator} compares the "
                "trajectories of a prompt, and one alone has advantage 0; must be 2 or more, such as 8"
            ]
        )


def print_warnings(config: Config) -> None:
    for line in training_warnings(config):
        print(f"warning: {line}", file=sys.stderr)


def load_policy(run: Run, learner: Learner) -> None:
    """The weights of the run's checkpoint, if it has one. A policy to start from, imported or warm-started, is also the
    reference of the KL; before going on from a later one, the reference is taken from where its run began."""
    if run.checkpoint is None:
        return
    begins = run.state.step == 0
    reference = (
        run.checkpoint if begins else run.reference() if learner.config.loss.kl_coef > 0 else None
    )
    if reference is not None:
        learner.policy.call("load", reference)
        learner.begin()
    if not begins:
        learner.policy.call("load", run.checkpoint)


# ---------------------------------------------------------------- the loop


class Loop:
    def __init__(self, config: Config, task: Task, cluster: Cluster, run: Run, log: MetricsLog):
        self.config, self.cluster, self.run_, self.log = config, cluster, run, log
        self.step = self.saved = run.state.step
        self.stops = False
        self.staleness = StalenessTracker(run.state.synced_versions)
        ahead = config.asynchronous
        self.stream = GroupStream(
            task.pool(cluster.engines.generate),
            task.stream(),
            config.rollout.prompts,
            config.train.steps,
            ahead.max_staleness,
            ahead.on_stale,
        )
        self.evaluation = Evaluation(
            self.stream, task.eval_pool(cluster.engines.generate), task.eval_prompts()
        )
        self.clock = Clock()
        self.line = LiveLine(config.train.steps, self.step)
        self.learner = Learner(config, cluster.policy, tell=self.line.say)

    def run(self, demonstrations: list[Group]) -> None:
        with self.line, self.stream:
            self.begin(demonstrations)
            with signals.asks(self.ask_to_stop):
                while self.step < self.config.train.steps and not self.stops:
                    self.advance()
                self.finish()

    def advance(self) -> None:
        """One step; none, if the run is asked to stop before its groups are there."""
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
        if self.is_due(self.config.checkpoint.every_steps):
            self.save(self.run_.checkpoints)

    def ask_to_stop(self) -> None:
        """Called by a signal: to end with a checkpoint, without waiting for groups or evaluations."""
        self.stops = True
        self.stream.interrupt()

    def finish(self) -> None:
        """With a checkpoint of the last step, if there was one."""
        if self.step > 0 and self.saved != self.step:
            self.save(self.run_.checkpoints)
        self.cluster.policy.call("finish_saving")
        if self.step < self.config.train.steps:
            raise signals.Stopped(f"stopped after step {self.step}")

    def begin(self, demonstrations: list[Group]) -> None:
        """Weights into the engines: those of the checkpoint, or fresh ones, warm-started and evaluated."""
        metrics: dict[str, float] = {}
        self.cluster.to_policy()
        load_policy(self.run_, self.learner)
        if self.step > 0:
            self.sync()
            state = self.run_.state
            self.stream.restore(
                self.step,
                StreamState(state.position, state.unfinished, state.ready, state.ready_begun),
            )
            if state.evaluates:
                self.evaluation.begin(self.step)
                while self.stream.ahead == 0 and not self.evaluation.is_done(wait_s=0.1):
                    pass  # with the weights that it is about
            return
        if demonstrations:
            with self.line.stage("warm start", self.config.warm_start.optimizer_steps) as on_step:
                metrics |= self.learner.warm_start(demonstrations, on_step)
        if demonstrations or self.run_.comes_from_another:
            self.save(self.run_.start)
        self.sync()
        with waiting("held-out evaluation"):
            metrics |= self.evaluate()
        self.log.write(0, metrics)

    def sync(self) -> int:
        """The policy's weights into the engines; returns their version."""
        version = self.cluster.sync()
        self.staleness.record_sync(version)
        return version

    def collect(self) -> tuple[list[Group], dict[str, float]]:
        """Rollout and filters: groups to train on, and metrics of all that was played for them."""
        kept, played, dropped, counts = [], [], [], Counter()
        wanted = self.config.rollout.prompts
        while wanted:
            with self.clock("time/rollout_s"):
                taken = self.stream.take(
                    self.step - 1, wanted if played else None, meanwhile=self.seal
                )
            played += taken.groups
            check_not_all_failed(played)
            fresh, old = self.staleness.drop_stale(taken.groups, self.stream.staleness_limit)
            passed, gone = sift(fresh, self.config)
            kept += passed
            dropped += gone + old
            counts.update({"async/waited": taken.waited, "async/dropped": taken.dropped})
            wanted = self.still_wanted(kept, played)
        self.keep_rollouts(played)
        metrics = rollout_metrics(played) | filter_metrics(dropped, _count(played)) | counts
        metrics |= self.staleness.metrics(kept, self.stream.staleness_limit)
        return kept, metrics | {"rollout/tokens_per_s": self.stream.tokens_per_s()}

    def keep_rollouts(self, played: list[Group]) -> None:
        """On disk: all of them now and then, and a few of the newest step for the report."""
        settings = self.config.run
        if settings.rollouts_every and self.is_due(settings.rollouts_every):
            store.write(self.run_.rollouts(self.step), played)
        if settings.report_prompts:
            store.write(
                self.run_.latest_rollouts, store.without_routing(played[: settings.report_prompts])
            )

    def still_wanted(self, kept: list[Group], played: list[Group]) -> int:
        """Prompts to be played in the place of those that were dropped."""
        prompts, settings = self.config.rollout.prompts, self.config.filters
        wanted = prompts - len(kept) if settings.dynamic_sampling else 0
        if wanted and len(played) >= settings.max_batches * prompts:
            raise RunFailed(
                f"filters.max_batches = {settings.max_batches}: of {len(played)} prompts {len(kept)} had an advantage "
                f"other than 0, {prompts} are needed; the task is too easy or too hard, or the limit too low"
            )
        return wanted

    def evaluate(self) -> dict[str, float]:
        """What there is to say of held-out prompts now. Training waits for it where it must: synchronous, at the
        beginning and at the end (the last step has an evaluation of its own), and before the next evaluation."""
        metrics, left = {}, self.config.train.steps - self.step
        if self.step == 0 or self.is_due(self.config.train.eval_every):
            metrics |= self.wait_for_evaluation()
            self.evaluation.begin(self.step)
        if self.stream.ahead == 0 or self.step == 0 or left <= 1 or self.evaluation.is_done():
            metrics |= self.wait_for_evaluation()
        return metrics

    def wait_for_evaluation(self) -> dict[str, float]:
        """Nothing if the run is asked to stop meanwhile: the evaluation is then made when it goes on."""
        if not self.evaluation.is_running:
            return {}
        with self.clock("time/eval_s"):
            while not self.evaluation.is_done(wait_s=0.1):
                if self.stops and self.step < self.config.train.steps:
                    return {}
            return self.evaluation.result()

    def save(self, root: Path) -> None:
        outstanding = self.stream.state()
        state = LoopState(
            self.step,
            **vars(outstanding),
            synced_versions=self.staleness.synced_versions,
            evaluates=self.evaluation.is_running,
        )
        self.cluster.policy.call("save", root, state)
        self.saved = self.step

    def seal(self) -> None:
        """A checkpoint that was written in the background is one from now on, not when the next is written."""
        if self.config.checkpoint.asynchronous:
            self.cluster.policy.call("seal_written")

    def is_due(self, every: int) -> bool:
        """After the last step, and every so many."""
        return self.step == self.config.train.steps or bool(every and self.step % every == 0)


class Evaluation:
    """Held-out prompts, sampled as `eval` says, beside whatever else goes on."""

    def __init__(self, stream: GroupStream, pool: Pool, prompts: list):
        self.stream, self.pool, self.prompts = stream, pool, prompts
        self._running: tuple[int, Future] | None = None

    def begin(self, step: int) -> None:
        self._running = step, self.stream.submit(self.pool.run(self.prompts))

    @property
    def is_running(self) -> bool:
        """Or has ended, and nobody has asked for its result yet."""
        return self._running is not None

    def is_done(self, wait_s: float = 0.0) -> bool:
        return self._running is not None and bool(wait([self._running[1]], wait_s).done)

    def result(self) -> dict[str, float]:
        """Its metrics, once; waits for them."""
        (step, future), self._running = self._running, None
        groups = future.result()
        check_not_all_failed(groups)
        return evaluation_metrics(groups) | {"eval/step": step}


def sift(groups: list[Group], config: Config) -> tuple[list[Group], list[filters.Dropped]]:
    """What can be trained on: nothing that failed, and what the configured filters leave."""
    settings, dropped = config.filters, []
    for keep in (
        filters.failed,
        filters.finite_rewards,
        lambda left: filters.truncated(left, settings.truncated),
        lambda left: drop_degenerate(left, config),
    ):
        groups, gone = keep(groups)
        dropped += gone
    counted: dict[tuple[int, int], filters.Dropped] = {}
    for gone in dropped:  # a trajectory that was masked may have been dropped later
        counted.setdefault((gone.group, gone.trajectory), gone)
    return groups, list(counted.values())


def drop_degenerate(
    groups: list[Group], config: Config
) -> tuple[list[Group], list[filters.Dropped]]:
    """Where the configuration asks for it. Supervised training has no advantages."""
    if config.loss.type == "nll" or not (
        config.filters.zero_variance or config.filters.dynamic_sampling
    ):
        return groups, []
    return filters.zero_variance(groups, **asdict(config.advantage))


def _count(groups: list[Group]) -> int:
    return sum(len(group.trajectories) for group in groups)


# ---------------------------------------------------------------- what people see


class Clock:
    """Seconds of the parts of a step, under the names of their metrics, and of the whole."""

    def __init__(self):
        self._created = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        self._begun, self._parts = time.perf_counter(), {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        now = time.perf_counter()
        return self._parts | {"time/step_s": now - self._begun, "time/run_s": now - self._created}


class LiveLine:
    """One line that says how far it is and how it goes."""

    def __init__(self, steps: int, done: int):
        self.steps, self.done = steps, done

    def __enter__(self) -> "LiveLine":
        self.bar: tqdm | None = None
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()

    @contextmanager
    def stage(self, name: str, steps: int) -> Iterator:
        """A line of its own for what comes before; yields what is to be called with the loss of each step."""
        with progress(name, steps, "step") as bar:

            def on_step(loss: float) -> None:
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()

            yield on_step

    def show(self, metrics: dict[str, float]) -> None:
        if (
            self.bar is None
        ):  # not before the first step has ended: what came before is not a step's time
            self.bar = progress("train", self.steps, "step", self.done)
        held_out = f", held-out {metrics['eval/success']:.2f}" if "eval/success" in metrics else ""
        self.bar.set_postfix_str(
            f"reward {metrics['reward/mean']:.2f}, success {metrics['reward/success']:.2f}{held_out}, "
            f"{metrics['rollout/tokens_per_s']:.0f} tokens/s",
            refresh=False,
        )
        self.bar.update()

    def say(self, text: str) -> None:
        tqdm.write(text)


def summary(folder: Path) -> str:
    """The first and the last of what matters, and where the rest is."""
    rows = read_metrics(folder)
    shown = {
        "held-out success": "eval/success",
        "reward": "reward/mean",
        "turns": "rollout/turns_mean",
        "response tokens": "rollout/response_tokens_mean",
        "mismatch, at most": "mismatch/max_abs",
        "tokens/s": "rollout/tokens_per_s",
        "seconds per step": "time/step_s",
    }
    lines = [f"{'':<18}{'first':>11}{'last':>11}"]
    for title, name in shown.items():
        values = [row[name] for row in rows if name in row]
        if values:
            lines.append(f"{title:<18}{values[0]:>11.3g}{values[-1]:>11.3g}")
    saved = latest(folder / "checkpoints")
    command = os.path.relpath(Path(sys.executable).with_name("megastep"))
    return "\n".join(
        [
            *lines,
            f"metrics: {folder}/metrics.jsonl, checkpoint: {saved}",
            f"export to Hugging Face: {command} export {saved} HF_FOLDER",
        ]
    )
