"""One episode: an environment and `generate` make a Trajectory.

    messages ← env.start()
    for each turn:
        render; too long a prompt ends the episode here
        generate → a Step: the prompt's ids, the sampled ids, nothing else
        observation, reward ← env.step(text of the response)

What can end it, as `Trajectory.stop_reason`:

    done           the environment said so
    max_turns      rollout.max_turns model calls were made
    context        the next prompt would exceed rollout.max_prompt_tokens; the last step's finish is `context`
    first_prompt   the very first one does; there is no step
    env_error      the environment raised or returned garbage      ┐ the last step's finish is `error`,
    env_timeout    it took longer than rollout.env_timeout_s       │ the reason is in env_metrics["error"];
    engine_error   `generate` raised                               ┘ without a step if it was the first thing to happen
    abort          the engine gave the request up; what it had sampled is kept

Invariants, held by the tests:
    a prompt has at most max_prompt_tokens, a response at most max_response_tokens with the appended token;
    a response ends with an end-of-turn token, unless it was aborted: one that was cut off gets it appended, untrained;
    an observation is in the next step's prompt and in no response; one longer than max_observation_chars is an error;
    an environment that does not end when it is cancelled is left behind: its episode ends, the task is waited for by
    nobody;
    experts are asked for from the first token on that no earlier step of the trajectory has recorded; after a weight
    sync from 0 on, since other weights choose other experts.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from megastep.config import RolloutConfig
from megastep.rollout.env import Env, Message, Outcome, answer, checked_outcome, checked_start, told
from megastep.rollout.generation import Generate, Generation, Sampling
from megastep.rollout.renderer import Renderer
from megastep.rollout.watch import STRETCH_S, LoopWatch, open_stretch, timed, warn
from megastep.samples.validation import recorded_tokens
from megastep.types import Step, Trajectory

CLOSE_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 5.0  # for an environment to end after it was cancelled


@dataclass(frozen=True)
class Limits:
    max_turns: int
    max_prompt_tokens: int
    max_response_tokens: int
    env_timeout_s: float
    max_observation_chars: int = RolloutConfig.max_observation_chars


class _Stop(Exception):
    """Ends the episode; `error` is what went wrong, where something did."""

    def __init__(self, reason: str, finish: str | None = None, error: str | None = None):
        super().__init__(reason)
        self.reason, self.finish, self.error = reason, finish, error


class _Late(Exception):
    """An environment took longer than it may."""


@dataclass
class Agent:
    """Plays episodes; holds nothing of any of them."""

    generate: Generate
    renderer: Renderer
    limits: Limits
    sampling: Sampling  # max_tokens, seed and stop_token_ids are filled in here
    seed: int | str = 0
    watch: LoopWatch = field(default_factory=LoopWatch)

    async def play(
        self, make_env: Callable[[], Env], group_id: int, index: int, session: str
    ) -> Trajectory:
        """Never raises because of the environment or the engine; cancellation passes through, the episode closed."""
        episode = _Episode(self, make_env, group_id, index, session)
        task = asyncio.create_task(episode.whole())
        try:
            await asyncio.wait([task, episode.late], return_when=asyncio.FIRST_COMPLETED)
            await _leave_behind_unless_it_ends(task, episode)
        except asyncio.CancelledError:
            task.cancel()
            await _leave_behind_unless_it_ends(task, episode)
            raise
        if task.cancelled():  # by nobody here
            return episode.trajectory(_Stop("env_error", "error", "it cancelled its own task"))
        if task.done():
            return task.result()
        return episode.trajectory(
            episode.stop or _Stop("env_timeout", "error", "it went on after it was cancelled")
        )


async def _leave_behind_unless_it_ends(task: asyncio.Task, episode: "_Episode") -> None:
    """Of an episode that was cancelled, or whose environment was because it was late."""
    if task.done() or (await asyncio.wait([task], timeout=CANCEL_TIMEOUT_S + CLOSE_TIMEOUT_S))[0]:
        return
    task.cancel()  # whenever it comes back, it goes no further
    asyncio._unregister_task(task)  # or whoever closes the loop would wait for it
    _left_behind.add(task)
    task.add_done_callback(_left_behind.discard)
    warn(
        f"environment {episode.env_name()}: went on after it was cancelled, and is left behind; it must not catch "
        "asyncio.CancelledError without raising it again"
    )


_left_behind: set[asyncio.Task] = set()  # the event loop itself holds tasks weakly


class _Episode:
    def __init__(
        self, agent: Agent, make_env: Callable[[], Env], group_id: int, index: int, session: str
    ):
        self.agent, self.make_env = agent, make_env
        self.group_id, self.index, self.session = group_id, index, session
        self.env: Env | None = None
        self.steps: list[Step] = []
        self.recorded = Recorded()
        self.metrics: dict = {}
        self.stop: _Stop | None = None  # once it is over but for closing
        self.late = (
            asyncio.get_running_loop().create_future()
        )  # has a result once the environment was late
        self.blocked_s = 0.0  # for which the environment held the event loop

    async def whole(self) -> Trajectory:
        try:
            await self.run()
        except _Stop as stop:
            self.stop = stop
        finally:
            await self.close()
        return self.trajectory(self.stop)

    async def run(self) -> None:
        limits = self.agent.limits
        messages = await self.call_env(self.start)
        history = self.render(self.agent.renderer.history, messages)
        state = None
        while True:
            if len(history.prompt_ids) > limits.max_prompt_tokens:
                raise _Stop("context", "context") if self.steps else _Stop("first_prompt")
            step = await self.call_model(history.prompt_ids)
            step.state = state
            self.steps.append(step)
            if step.finish == "abort":
                raise _Stop("abort")
            outcome = await self.call_env(self.step, step.response_ids)
            step.reward, state = outcome.reward, outcome.state
            self.metrics |= outcome.metrics
            if outcome.done:
                raise _Stop("done")
            if len(self.steps) == limits.max_turns:
                raise _Stop("max_turns")
            self.render(history.extend, step.response_ids, outcome.observation)

    async def start(self) -> list[Message]:
        self.env = self.make_env()
        return checked_start(
            await answer(self.env, "start"), self.agent.limits.max_observation_chars
        )

    async def step(self, response_ids: np.ndarray) -> Outcome:
        made = await answer(self.env, "step", self.agent.renderer.text(response_ids), response_ids)
        return checked_outcome(made, self.agent.limits.max_observation_chars)

    async def call_env(self, method: Callable, *arguments):
        """Whatever an environment does, it does to its own trajectory only."""
        try:
            return await self.limited(self.agent.limits.env_timeout_s, method, *arguments)
        except _Late as late:
            raise _Stop("env_timeout", "error", str(late)) from None
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            _check_own_cancellation(error)
            raise _Stop("env_error", "error", told(error)) from None

    async def limited(self, seconds: float, method: Callable, *arguments):
        """The result of a method; _Late after some time, cancelled or not."""
        alarm = asyncio.get_running_loop().call_later(
            seconds, lambda: self.late.done() or self.late.set_result(None)
        )
        try:
            async with asyncio.timeout(seconds) as clock:
                name = method.__name__
                made = await timed(
                    method(*arguments), lambda: self.who(name), lambda s: self.watched(name, s)
                )
        except (Exception, asyncio.CancelledError):
            if not clock.expired():
                raise
        finally:
            alarm.cancel()
        if asyncio.current_task().cancelling():  # and the environment kept it to itself
            raise asyncio.CancelledError
        if clock.expired():
            raise _Late(f"no answer within {seconds:g} s")
        return made

    def watched(self, method: str, stretch_s: float) -> None:
        self.agent.watch.add(self.env_name(), method, stretch_s)
        if stretch_s >= STRETCH_S:
            self.blocked_s += stretch_s

    def who(self, method: str) -> str:
        return (
            "the environment's __init__"
            if self.env is None
            else f"environment {self.env_name()}: {method}()"
        )

    def env_name(self) -> str:
        return "that could not be made" if self.env is None else type(self.env).__name__

    def render(self, method: Callable, *arguments):
        """What cannot be rendered or encoded is the environment's: it said it."""
        try:
            with open_stretch(
                lambda: f"environment {self.env_name()}: the chat template, on its messages,"
            ):
                return method(*arguments)
        except Exception as error:
            raise _Stop("env_error", "error", told(error)) from None

    async def call_model(self, prompt_ids: np.ndarray) -> Step:
        agent = self.agent
        # One token is kept back: a response that is cut off gets its end-of-turn token appended.
        sampling = replace(
            agent.sampling,
            max_tokens=agent.limits.max_response_tokens - 1,
            stop_token_ids=agent.renderer.stop_ids,
            seed=call_seed(agent.seed, self.group_id, self.index, len(self.steps)),
        )
        try:
            made = await agent.generate(
                prompt_ids,
                sampling,
                session=self.session,
                routing_start=self.recorded.tokens(prompt_ids),
                routing_version=self.recorded.version,
            )
        except (Exception, asyncio.CancelledError) as error:
            _check_own_cancellation(error)
            raise _Stop("engine_error", "error", told(error)) from None
        step = make_step(len(self.steps), prompt_ids, made, agent.renderer)
        self.recorded.add(step, made)
        return step

    def trajectory(self, stop: _Stop) -> Trajectory:
        if stop.error is not None:
            self.metrics["error"] = stop.error
        if self.blocked_s:
            self.metrics["event_loop_blocked_s"] = round(self.blocked_s, 3)
        if self.steps:
            self.steps[-1].last = True
            self.steps[-1].finish = stop.finish or self.steps[-1].finish
        return Trajectory(self.group_id, self.index, self.steps, stop.reason, self.metrics)

    async def close(self) -> None:
        async def close() -> None:
            await answer(self.env, "close")

        if self.env is None:
            return
        try:
            await self.limited(CLOSE_TIMEOUT_S, close)
        except (
            Exception,
            asyncio.CancelledError,
            SystemExit,
        ) as error:  # the episode is over: what it gave stands
            _check_own_cancellation(error)
            self.metrics.setdefault("error", f"close: {told(error)}")


def make_step(index: int, prompt_ids: np.ndarray, made: Generation, renderer: Renderer) -> Step:
    """A generation as a step, closed by an untrained end-of-turn token if it was cut off."""
    ids, logprobs, versions = made.ids, made.logprobs, made.versions
    trained = np.ones(len(ids), bool)
    if made.finish != "abort" and not (len(ids) and ids[-1] in renderer.stop_ids):
        ids = np.append(ids, np.int32(renderer.end_id))
        logprobs = np.append(logprobs, np.float32(0))
        trained = np.append(trained, False)
        versions = versions.copy() if len(versions) else np.array([[0, 0]], np.int32)
        versions[-1, 1] += 1  # counted with the last sampled one
    return Step(
        index=index,
        last=False,
        prompt_ids=prompt_ids,
        response_ids=ids,
        loss_mask=trained,
        logprobs=logprobs,
        versions=versions,
        finish=made.finish,
        routing=made.routing,
        routing_start=made.routing_start,
    )


@dataclass
class Recorded:
    """The steps of a trajectory whose experts a next call need not record again: all of one weight version."""

    version: int | None = None
    steps: list[Step] = field(default_factory=list)

    def tokens(self, prompt_ids: np.ndarray) -> int:
        """How many leading tokens of a prompt these steps have recorded. Its last token is always computed."""
        return recorded_tokens(self.steps, prompt_ids, len(prompt_ids) - 1)

    def add(self, step: Step, made: Generation) -> None:
        """A call that met a weight sync, before its first token or later, has experts of two versions: a next call
        records all of its own."""
        versions = set(made.versions[:, 0].tolist())
        same = versions == {self.version}
        begins = len(versions) == 1 and step.routing_start == 0
        if not same:
            self.steps = []
            self.version = versions.pop() if begins else None
        if same or begins:
            self.steps.append(step)


def call_seed(seed: int | str, group_id: int, index: int, turn: int) -> int:
    """The same number for the same call of the same run, and no relation between different ones."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{index}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # fits an int64 everywhere


def _check_own_cancellation(error: BaseException) -> None:
    """Passes on what cancels the episode; one that leaks out of somebody's client is a failure like others."""
    if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
        raise error
