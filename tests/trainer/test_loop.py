"""The training loop with fake episodes and a fake policy: what it calls, and in which order."""

import asyncio
from types import SimpleNamespace

import pytest

from megastep.checkpoint.loop_state import LoopState
from megastep.config import CheckpointConfig, load
from megastep.console import LiveLine
from megastep.errors import PolicyLost, RoutingLost, RunFailed
from megastep.report.metrics_log import MetricsLog, read_metrics
from megastep.rollout import stream
from megastep.rollout.data import Prompt, PromptStream
from megastep.samples import store
from megastep.signals import Stopped
from megastep.trainer import loop as loop_module
from megastep.trainer.loop import Loop
from megastep.trainer.rundir import Run
from megastep.types import FAILED, FinishReason, Group
from tests.rollout.test_stream import Episodes, Stored, settled
from tests.runs import LOCAL
from tests.trainer.test_rundir import checkpoint

GIVEN = ("rollout.prompts=4", "train.mini_batch_prompts=4", "train.steps=9", "run.rollouts_every=0")


class Versioned(Episodes):
    """Every token of an episode has weight version `version`."""

    version = 0

    async def run_episode(self, prompt, index):
        trajectory = await super().run_episode(prompt, index)
        trajectory.steps[0].versions[:, 0] = self.version
        trajectory.steps[0].reward = float(index)
        return trajectory


class Truncated(Versioned):
    """Every trajectory of an even prompt is truncated."""

    async def run_episode(self, prompt, index):
        trajectory = await super().run_episode(prompt, index)
        is_odd = prompt.id % 2 == 1
        trajectory.steps[0].finish = FinishReason.STOP if is_odd else FinishReason.LENGTH
        return trajectory


class Policy:
    """Records the calls of the loop."""

    def __init__(self, on_call=lambda method: None):
        self.calls: list[str] = []
        self.on_call = on_call

    def __getattr__(self, method: str):
        def call(*_) -> None:
            self.calls.append(method)
            self.on_call(method)

        return call


def make_loop(tmp_path, episodes: Episodes, *given: str, state: LoopState | None = None) -> Loop:
    prompts = PromptStream([{"n": n} for n in range(50)], seed=0)
    task = SimpleNamespace(
        pool=lambda _: episodes,
        stream=lambda: prompts,
        eval_prompts=lambda: ["held out"],
        eval_pool=lambda _: SimpleNamespace(run=held_out),
    )
    cluster = SimpleNamespace(
        engines=SimpleNamespace(generate=None),
        policy=Policy(),
        sync=lambda: 7,
        to_policy=lambda: None,
        pool=lambda local: local,
        metrics=dict,
    )
    run = Run(tmp_path, None, state or LoopState(0))
    loop = Loop(load(LOCAL, [*GIVEN, *given]), task, cluster, run, log=None)
    episodes.stream = loop.stream
    return loop


async def held_out(prompts: list, on_trajectory) -> list:
    return prompts


@pytest.mark.parametrize("version, kept", [(3, 0), (5, 4), (6, 4)])
def test_s15_stale_tokens_are_not_trained_on(version, kept, tmp_path):
    """By the versions of the tokens, not by the schedule."""
    episodes = Versioned()
    episodes.version = version
    loop = make_loop(tmp_path, episodes, "async.max_staleness=1")
    loop.staleness.synced_versions = [3, 5, 6]
    loop.step = 1
    with loop.stream:
        groups, metrics = loop.collect()
    assert (
        len(groups) == kept and metrics["rollout/trajectories"] == 4 * episodes.samples_per_prompt
    )
    assert metrics["filter/dropped"] == (4 - kept) * episodes.samples_per_prompt


@pytest.mark.parametrize(
    "sampling, kept, prompts", [(True, [1, 3, 5, 7], 8), (False, [0, 1, 2, 3], 4)]
)
def test_a10_a_group_without_a_trained_token_does_not_fill_a_batch(
    sampling, kept, prompts, tmp_path
):
    """Dynamic sampling replaces a group whose tokens are all masked; without it, the group stays.

    Rewards differ in every group. A trajectory that is both masked and dropped counts once.
    """
    loop = make_loop(
        tmp_path, Truncated(), "filters.truncated=mask", f"filters.dynamic_sampling={sampling}"
    )
    loop.step = 1
    with loop.stream:
        groups, metrics = loop.collect()
    assert [group.id for group in groups] == kept and metrics["rollout/prompts"] == prompts
    assert metrics["filter/dropped"] == prompts // 2 * Truncated.samples_per_prompt
    assert metrics["filter/dropped_fraction"] == 0.5


def test_s15_dropped_groups_are_counted(tmp_path):
    """async.on_stale=drop: prompt 1 never ends, and the loop does not wait for it."""
    loop = make_loop(
        tmp_path,
        Versioned(lambda id, index: None if id == 1 else 0.0),
        "async.max_staleness=1",
        "async.on_stale=drop",
    )
    loop.staleness.synced_versions = [0]
    counted = []
    with loop.stream:
        for loop.step in (1, 2, 3):
            counted.append(loop.collect()[1]["async/dropped"])
    assert counted == [0, 0, 1]


@pytest.mark.parametrize("evaluates", [True, False])
def test_s5_x6_an_interrupted_evaluation_runs_again(evaluates, tmp_path):
    state = LoopState(2, evaluates=evaluates, synced_versions=[3, 5])
    loop = make_loop(tmp_path, Versioned(), "async.max_staleness=1", state=state)
    with loop.stream:
        loop.begin([])
        assert loop.evaluation.is_running == evaluates
        if evaluates:
            step, future = loop.evaluation._step, loop.evaluation._groups
            assert step == 2 and future.result() == ["held out"]
    # The versions before the restart, and the one of the engines now.
    assert loop.staleness.synced_versions == [3, 5, 7]


@pytest.mark.parametrize("in_background", [True, False])
def test_x6_a_background_checkpoint_is_published_during_a_rollout(
    in_background, tmp_path, monkeypatch
):
    monkeypatch.setattr(stream, "MEANWHILE_S", 0.01)
    loop = make_loop(
        tmp_path, Versioned(lambda id, index: 0.2), f"checkpoint.asynchronous={in_background}"
    )
    loop.step = 1
    with loop.stream:
        loop.collect()
    assert ("seal_written" in loop.cluster.policy.calls) == in_background


class StoredOnce(Stored, Versioned):
    """Groups whose routing is elsewhere."""


def test_x6_stored_routing_of_ready_groups_is_written_before_the_ranks_save(tmp_path, monkeypatch):
    written = {}

    def write(path, groups):
        written[path] = [group.id for group in groups]

    monkeypatch.setattr(loop_module, "write_rollouts", write)
    loop = make_loop(tmp_path, StoredOnce(100), "async.max_staleness=1")
    saved = []
    loop.cluster.policy.save = lambda root, state: saved.append(state)
    loop.step = 1
    with loop.stream:
        loop.collect()
        settled(loop.stream)
        loop.save(tmp_path / "checkpoints")
    (state,) = saved
    assert state.ready == [] and written == {state.ready_file: [4, 5, 6, 7]}
    assert state.ready_file == tmp_path / "checkpoints" / "ready_1.partial"


# ---------------------------------------------------------------- filters


class Judged(Episodes):
    """One step each; `judge(prompt, index, trajectory)` sets its reward, or an error."""

    def __init__(self, judge):
        super().__init__()
        self.judge = judge

    async def run_episode(self, prompt, index):
        trajectory = await super().run_episode(prompt, index)
        trajectory.steps[0].versions[:, 0] = 0
        self.judge(prompt.id, index, trajectory)
        return trajectory


def collected(tmp_path, judge, *given: str) -> tuple[list, dict]:
    """The groups to train on, as {id: indices of its trajectories}, and the metrics."""
    loop = make_loop(tmp_path, Judged(judge), *given)
    loop.staleness.synced_versions = [0]
    loop.step = 1
    with loop.stream:
        groups, metrics = loop.collect()
    return {group.id: [t.index for t in group.trajectories] for group in groups}, metrics


def rewarded(id, index, trajectory):
    trajectory.steps[0].reward = float(index)


ALL = [0, 1, 2]  # the trajectories of a prompt


@pytest.mark.parametrize("stop_reason", FAILED)
def test_failed_episodes_are_not_trained_on(stop_reason, tmp_path):
    """Even with a reward."""

    def judge(id, index, trajectory):
        rewarded(id, index, trajectory)
        if (id, index) == (1, 2):
            trajectory.stop_reason = stop_reason

    kept, metrics = collected(tmp_path, judge)
    assert kept == {0: ALL, 1: [0, 1], 2: ALL, 3: ALL}
    assert metrics["filter/dropped"] == 1 and metrics["rollout/trajectories"] == 12


def test_non_finite_rewards_are_not_trained_on(tmp_path):
    def judge(id, index, trajectory):
        trajectory.steps[0].reward = float("nan") if (id, index) == (2, 0) else float(index)

    kept, metrics = collected(tmp_path, judge)
    assert kept == {0: ALL, 1: ALL, 2: [1, 2], 3: ALL}
    assert metrics["filter/dropped"] == 1


@pytest.mark.parametrize(
    "policy, kept, trained", [("keep", ALL, 6), ("mask", ALL, 4), ("drop", [0, 2], 4)]
)
def test_filters_truncated(policy, kept, trained, tmp_path):
    def judge(id, index, trajectory):
        rewarded(id, index, trajectory)
        if (id, index) == (1, 1):
            trajectory.steps[0].finish = FinishReason.LENGTH

    loop = make_loop(tmp_path, Judged(judge), f"filters.truncated={policy}")
    loop.staleness.synced_versions = [0]
    loop.step = 1
    with loop.stream:
        (group,) = [group for group in loop.collect()[0] if group.id == 1]
    assert [t.index for t in group.trajectories] == kept
    assert sum(int(t.steps[0].loss_mask.sum()) for t in group.trajectories) == trained


def odd_ones_differ(id, index, trajectory):
    trajectory.steps[0].reward = float(index) if id % 2 else 1.0


@pytest.mark.parametrize(
    "given, ids, prompts",
    [
        ([], [0, 1, 2, 3], 4),
        (["filters.zero_variance=true"], [1, 3], 4),
        (["filters.dynamic_sampling=true"], [1, 3, 5, 7], 8),
    ],
)
def test_degenerate_groups(given, ids, prompts, tmp_path):
    """Kept, dropped, or replaced; dynamic_sampling needs no zero_variance."""
    kept, metrics = collected(tmp_path, odd_ones_differ, *given)
    assert list(kept) == ids
    assert metrics["rollout/prompts"] == prompts
    assert metrics["filter/dropped"] == 3 * (prompts - len(ids))


@pytest.mark.parametrize("limit", [2, 3])
def test_dynamic_sampling_fails_after_max_batches(limit, tmp_path):
    def all_alike(id, index, trajectory):
        trajectory.steps[0].reward = 1.0

    with pytest.raises(
        RunFailed, match=f"filters.max_batches = {limit}: of {4 * limit} prompts 0 had"
    ):
        collected(
            tmp_path, all_alike, "filters.dynamic_sampling=true", f"filters.max_batches={limit}"
        )


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def minutes(monkeypatch):
    """`minutes(n)`: lets n minutes pass for the loop."""
    now_s = 1000.0

    def wait(count: float) -> None:
        nonlocal now_s
        now_s += 60 * count

    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    return wait


def test_default_checkpoint_intervals():
    settings = CheckpointConfig()
    assert (settings.every_steps, settings.every_minutes) == (10, 15.0)


@pytest.mark.parametrize("step", [4, 5])
def test_x6_a_checkpoint_is_due_after_every_minutes(step, minutes, tmp_path):
    """Counted from the start, then from the last checkpoint, whichever training step it is."""
    loop = make_loop(
        tmp_path, Versioned(), "checkpoint.every_steps=0", "checkpoint.every_minutes=2.5"
    )
    loop.step = step
    assert not loop.is_checkpoint_due()
    minutes(2.4)
    assert not loop.is_checkpoint_due()
    minutes(0.2)
    assert loop.is_checkpoint_due()
    with loop.stream:
        loop.save(tmp_path)
    assert loop.saved_step == step and not loop.is_checkpoint_due()
    minutes(2.4)
    assert not loop.is_checkpoint_due()
    minutes(0.2)
    assert loop.is_checkpoint_due()


def test_x6_every_minutes_is_0_for_no_such_limit(minutes, tmp_path):
    loop = make_loop(
        tmp_path, Versioned(), "checkpoint.every_steps=4", "checkpoint.every_minutes=0"
    )
    minutes(10_000)
    due = []
    for step in range(1, 10):
        loop.step = step
        due.append(loop.is_checkpoint_due())
    assert [step for step, is_due in enumerate(due, 1) if is_due] == [4, 8, 9]  # 9: the last


def test_x6_a_training_step_saves_once_the_minutes_have_passed(minutes, tmp_path, monkeypatch):
    """Training steps of four minutes: a checkpoint after each second and after the last."""
    given = ("checkpoint.every_steps=0", "checkpoint.every_minutes=7", "train.steps=5")
    loop = make_loop(tmp_path, Judged(rewarded), *given, "optimizer.warmup_steps=0")
    loop.learner = SimpleNamespace(learn=lambda groups: minutes(4) or {}, policy=None)
    loop.log = SimpleNamespace(write=lambda step, metrics: None)
    loop.cluster.sync = lambda: 0
    saved: list[tuple[str, int]] = []
    loop.cluster.policy.on_call = lambda method: saved.append((method, loop.step))
    loop.evaluation.pool = SimpleNamespace(run=evaluated(asyncio.run(one_group(loop)), loop, []))
    monkeypatch.setattr(LiveLine, "show", lambda self, metrics: None)
    loop.run([])
    assert [step for method, step in saved if method == "save"] == [2, 4, 5]


# ---------------------------------------------------------------- a whole run


def test_schedule_of_a_run(tmp_path, monkeypatch):
    """train.steps, train.eval_every, checkpoint.every_steps, run.rollouts_every,
    run.report_prompts, rollout.prompts, eval.prompts.
    """
    loop = make_loop(
        tmp_path,
        Judged(rewarded),
        "train.steps=7",
        "train.eval_every=3",
        "checkpoint.every_steps=2",
        "run.rollouts_every=5",
        "run.report_prompts=2",
        "async.max_staleness=0",
        "rollout.prompts=3",
        "optimizer.warmup_steps=0",
    )
    learned: list[list[int]] = []
    rows: list[tuple[int, dict]] = []
    saved: list[tuple[str, int]] = []
    begun: list[int] = []
    loop.learner = SimpleNamespace(
        learn=lambda groups: learned.append([g.id for g in groups]) or {}, policy=None
    )
    loop.log = SimpleNamespace(write=lambda step, metrics: rows.append((step, metrics)))
    loop.cluster.policy.on_call = lambda method: saved.append((method, loop.step))
    loop.cluster.sync = lambda: 0  # the weight version of the episodes
    held_out_groups = asyncio.run(one_group(loop))
    loop.evaluation.pool = SimpleNamespace(run=evaluated(held_out_groups, loop, begun))
    monkeypatch.setattr(LiveLine, "show", lambda self, metrics: None)
    loop.run([])
    assert learned == [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(7)]
    assert [step for step, _ in rows] == list(range(8))
    assert begun == [0, 3, 6, 7] == [step for step, metrics in rows if "eval/success" in metrics]
    assert [step for method, step in saved if method == "save"] == [2, 4, 6, 7]
    kept = {
        p.stem: [group.id for group in store.read(p)] for p in (tmp_path / "rollouts").iterdir()
    }
    assert kept == {"step_5": [12, 13, 14], "step_7": [18, 19, 20], "latest": [18, 19]}


async def one_group(loop) -> list:
    """A group for the evaluation to return."""
    return [
        Group(0, [await loop.stream.pool.run_episode(Prompt(0, {}), index) for index in range(3)])
    ]


def evaluated(groups: list, loop, begun: list):
    async def run(prompts: list, on_trajectory) -> list:
        assert prompts == ["held out"]
        begun.append(loop.step)
        return groups

    return run


# ---------------------------------------------------------------- lost ranks


class Attempts:
    """Loops that end as scripted: they save these steps, then ranks are lost, or the run ends."""

    loss: Exception = PolicyLost("policy rank 1 died")

    def __init__(self, *scripts: list[int], folder):
        self.scripts = list(scripts)
        self.folder = folder
        self.begun: list[int] = []
        self.restarts = 0

    def loop(self, config, task, cluster, run, log):
        self.begun.append(run.state.step)
        return SimpleNamespace(run=lambda demonstrations: self.attempt(log))

    def attempt(self, log) -> None:
        saved = self.scripts.pop(0)
        for step in saved:
            log.write(step, {"attempt": len(self.begun)})
            checkpoint(self.folder / "checkpoints", step)
        log.write(99, {"attempt": len(self.begun)})
        if self.scripts:
            raise self.loss

    def restart_policy(self) -> None:
        self.restarts += 1


def train_with(tmp_path, monkeypatch, restarts: int, *scripts: list[int]) -> Attempts:
    config = load(LOCAL, [f"run.dir={tmp_path}", "run.name=one", f"train.restarts={restarts}"])
    run = Run.find(config, "local")
    run.create(config)
    attempts = Attempts(*scripts, folder=run.folder)
    monkeypatch.setattr(loop_module, "Loop", attempts.loop)
    with MetricsLog(run.folder, -1, "disabled", {}) as log:
        loop_module.run_to_the_end(config, None, attempts, run, log, [])
    return attempts


def test_x18_lost_ranks_are_replaced_and_rows_after_the_checkpoint_dropped(
    tmp_path, monkeypatch, capsys
):
    """Two losses before the first checkpoint, then one after each."""
    attempts = train_with(tmp_path, monkeypatch, 2, [], [], [3], [5], [7])
    assert attempts.begun == [0, 0, 0, 3, 5] and attempts.restarts == 4
    rows = [(row["step"], row["attempt"]) for row in read_metrics(tmp_path / "one")]
    assert rows == [(3, 3), (5, 4), (7, 5), (99, 5)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "policy rank 1 died; new ranks continue from the beginning (2 of train.restarts = 2 since "
        "the newest checkpoint)",
        "policy rank 1 died; new ranks continue after step 3 (1 of train.restarts = 2 since the "
        "newest checkpoint)",
    ]


def test_x18_the_loss_of_recorded_routing_is_one_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Attempts, "loss", RoutingLost("its node ended"))
    attempts = train_with(tmp_path, monkeypatch, 1, [3], [])
    assert attempts.begun == [0, 3] and attempts.restarts == 1


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_x18_ranks_that_are_lost_again_and_again_end_the_run(restarts, tmp_path, monkeypatch):
    """train.restarts"""
    scripts = [[4], *[[]] * 5]
    with pytest.raises(PolicyLost, match=f"died; {restarts} of train.restarts = {restarts} since"):
        train_with(tmp_path, monkeypatch, restarts, *scripts)


def test_x18_ranks_lost_during_their_restart_count_too(tmp_path, monkeypatch):
    def restart_policy(attempts) -> None:
        attempts.restarts += 1
        if attempts.restarts == 1:
            raise PolicyLost("policy rank 0 died")

    monkeypatch.setattr(Attempts, "restart_policy", restart_policy)
    attempts = train_with(tmp_path, monkeypatch, 2, [4], [6])
    assert attempts.begun == [0, 4] and attempts.restarts == 2


def test_x18_an_error_of_a_ranks_code_is_no_lost_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(Attempts, "attempt", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_with(tmp_path, monkeypatch, 2, [])


def test_x18_a_lost_rank_ends_a_rollout(tmp_path, monkeypatch):
    """That waits for an engine, which waits for the policy."""
    monkeypatch.setattr(stream, "MEANWHILE_S", 0.01)
    loop = make_loop(tmp_path, Versioned(lambda id, index: None))
    loop.cluster.policy.on_call = lose_at("check")
    with loop.stream, pytest.raises(PolicyLost):
        loop.step = 1
        loop.collect()


@pytest.mark.parametrize("resumes", [True, False])
def test_x18_a_lost_rank_ends_an_evaluation(resumes, tmp_path):
    async def never(prompts, on_trajectory):
        await asyncio.Event().wait()

    state = LoopState(2, evaluates=True, synced_versions=[3]) if resumes else None
    loop = make_loop(tmp_path, Versioned(), state=state)
    loop.evaluation.pool = SimpleNamespace(run=never)
    loop.cluster.policy.on_call = lose_at("check")
    with loop.stream, pytest.raises(PolicyLost):
        loop.begin([])


def test_x18_ranks_lost_while_the_run_stops_do_not_restart(tmp_path):
    """A job that is preempted may lose them before the checkpoint."""
    loop = make_loop(tmp_path, Versioned())
    loop.evaluation.result = dict
    loop.log = SimpleNamespace(write=lambda step, metrics: None)
    loop.advance = lambda: loop.ask_to_stop() or loop.cluster.policy.save()
    loop.cluster.policy.on_call = lose_at("save")
    with pytest.raises(Stopped, match="stopped in step 0; policy rank 1 died"):
        loop.run([])


def lose_at(lost_at: str):
    def on_call(method: str) -> None:
        if method == lost_at:
            raise PolicyLost("policy rank 1 died")

    return on_call
