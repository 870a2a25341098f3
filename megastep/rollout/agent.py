"""One episode: an environment and `generate` produce a Trajectory.

    messages ← env.start()
    for each turn:
        render the prompt; an over-long one ends the episode
        generate → a Step: the prompt's ids and the sampled ids
        observation, reward ← env.step(text of the response)

How an episode ends, as `Trajectory.stop_reason` (StopReason):

    DONE           the environment returned done
    MAX_TURNS      rollout.max_turns model calls were made
    CONTEXT        the next prompt would exceed rollout.max_prompt_tokens; the last step's finish
                   is FinishReason.CONTEXT
    FIRST_PROMPT   the first prompt exceeds it; the trajectory has no steps
    ENV_ERROR      the environment raised or returned an invalid value
    ENV_TIMEOUT    the environment took longer than rollout.env_timeout_s
    ENGINE_ERROR   `generate` raised
    ABORT          the engine aborted the request; the sampled tokens are kept

After ENV_ERROR, ENV_TIMEOUT and ENGINE_ERROR env_metrics["error"] holds the reason, and the last
step's finish is FinishReason.ERROR; there is no step if the failure came before the first one.

Invariants, held by the tests:
    A prompt has at most max_prompt_tokens, a response at most max_response_tokens including an
    appended token.
    A response ends with an end-of-turn token unless it was aborted; a truncated response gets one
    appended, outside the loss mask.
    An observation is in the next step's prompt and in no response; one longer than
    max_observation_chars is an error.
    An environment that ignores its cancellation is abandoned: its episode ends without it.
    Routing is requested from the first token that no earlier step of the trajectory has recorded;
    after a weight sync from token 0, since new weights route differently.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from megastep.config import RolloutConfig
from megastep.rollout.encoding import LONG_CHARS, encoding_thread
from megastep.rollout.env import (
    Env,
    Message,
    Outcome,
    call_method,
    checked_outcome,
    checked_start,
)
from megastep.rollout.generation import Generate, Generation, Sampling, Session
from megastep.rollout.renderer import History, Renderer
from megastep.rollout.watch import BLOCKED_S, LoopWatch, timed, warn, watched
from megastep.samples.prefix import common_prefix
from megastep.samples.validation import recorded_tokens
from megastep.text import describe
from megastep.types import FinishReason, Step, StopReason, Trajectory

CLOSE_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 5.0  # for an environment to end after its cancellation


@dataclass(frozen=True)
class Limits:
    max_turns: int
    max_prompt_tokens: int
    max_response_tokens: int
    env_timeout_s: float
    max_observation_chars: int = RolloutConfig.max_observation_chars


class _Stop(Exception):
    """Ends the episode; `error` describes a failure."""

    def __init__(
        self, reason: StopReason, finish: FinishReason | None = None, error: str | None = None
    ):
        super().__init__(reason)
        self.reason = reason
        self.finish = finish
        self.error = error


def _failure(reason: StopReason, error: str) -> _Stop:
    return _Stop(reason, FinishReason.ERROR, error)


class _Late(Exception):
    """An environment exceeded its time limit."""


@dataclass
class Agent:
    """Runs episodes; stateless across them."""

    generate: Generate
    renderer: Renderer
    limits: Limits
    sampling: Sampling  # max_tokens, seed and stop_token_ids are set per call
    seed: int | str = 0
    watch: LoopWatch = field(default_factory=LoopWatch)

    async def run_episode(
        self, make_env: Callable[[], Env], group_id: int, index: int, session: Session
    ) -> Trajectory:
        """Never raises for a failing environment or engine. Cancellation closes the environment."""
        episode = _Episode(self, make_env, group_id, index, session)
        task = asyncio.create_task(episode.run_and_close())
        try:
            await asyncio.wait([task, episode.late], return_when=asyncio.FIRST_COMPLETED)
            await _wait_or_abandon(task, episode)
        except asyncio.CancelledError:
            task.cancel()
            await _wait_or_abandon(task, episode)
            raise
        if task.cancelled():  # by the environment: a cancelled caller has returned above
            return episode.trajectory(_failure(StopReason.ENV_ERROR, "it cancelled its own task"))
        if task.done():
            return task.result()
        ignored = _failure(StopReason.ENV_TIMEOUT, "it ignored its cancellation")
        return episode.trajectory(episode.stop or ignored)


async def _wait_or_abandon(task: asyncio.Task, episode: "_Episode") -> None:
    """Wait for an episode that was cancelled, or whose environment was; abandon it if it hangs."""
    if task.done():
        return
    done, _ = await asyncio.wait([task], timeout=CANCEL_TIMEOUT_S + CLOSE_TIMEOUT_S)
    if done:
        return
    task.cancel()  # should it ever resume
    asyncio._unregister_task(task)  # closing the loop would wait for it
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    warn(
        f"environment {episode.env_name()}: ignored its cancellation and is abandoned; it must not "
        "catch asyncio.CancelledError without raising it again"
    )


_abandoned: set[asyncio.Task] = set()  # the event loop holds tasks by weak references


class _Episode:
    def __init__(
        self, agent: Agent, make_env: Callable[[], Env], group_id: int, index: int, session: Session
    ):
        self.agent = agent
        self.make_env = make_env
        self.group_id = group_id
        self.index = index
        self.session = session
        self.env: Env | None = None
        self.steps: list[Step] = []
        self.sequence = np.empty(0, np.int32)  # tokens of the latest step, prompt and response
        self.recorded = Recorded()
        self.metrics: dict = {}
        self.stop: _Stop | None = None  # set before the environment is closed
        self.late: asyncio.Future = asyncio.get_running_loop().create_future()  # done: env timeout
        self.blocked_s = 0.0  # time the environment blocked the event loop

    async def run_and_close(self) -> Trajectory:
        try:
            await self.run()
        except _Stop as stop:
            self.stop = stop
        finally:
            await self.close()
        assert self.stop is not None  # run() never returns
        return self.trajectory(self.stop)

    async def run(self) -> None:
        limits = self.agent.limits
        messages = await self.call_env(self.start)
        history = self.render(self.agent.renderer.begin, messages)
        await self.encode(history, messages)
        state = None
        while True:
            if len(history.prompt_ids) > limits.max_prompt_tokens:
                if not self.steps:
                    raise _Stop(StopReason.FIRST_PROMPT)
                raise _Stop(StopReason.CONTEXT, FinishReason.CONTEXT)
            step = await self.call_model(history.prompt_ids)
            step.state = state
            self.steps.append(step)
            if step.finish == FinishReason.ABORT:
                raise _Stop(StopReason.ABORT)
            outcome = await self.call_env(self.step, step.response_ids)
            step.reward = outcome.reward
            state = outcome.state
            self.metrics |= outcome.metrics
            if outcome.done:
                raise _Stop(StopReason.DONE)
            if len(self.steps) == limits.max_turns:
                raise _Stop(StopReason.MAX_TURNS)
            self.render(history.add, step.response_ids, outcome.observation)
            await self.encode(history, outcome.observation)

    async def start(self) -> list[Message]:
        self.env = self.make_env()
        messages = await call_method(self.env, "start")
        return checked_start(messages, self.agent.limits.max_observation_chars)

    async def step(self, response_ids: np.ndarray) -> Outcome:
        assert self.env is not None
        text = self.agent.renderer.text(response_ids)
        outcome = await call_method(self.env, "step", text, response_ids)
        return checked_outcome(outcome, self.agent.limits.max_observation_chars)

    async def call_env(self, method: Callable, *arguments):
        """A failing environment ends its own trajectory only."""
        try:
            return await self.limited(self.agent.limits.env_timeout_s, method, *arguments)
        except _Late as late:
            raise _failure(StopReason.ENV_TIMEOUT, str(late)) from None
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            _reraise_own_cancellation(error)
            raise _failure(StopReason.ENV_ERROR, describe(error)) from None

    async def limited(self, timeout_s: float, method: Callable, *arguments):
        """Await a method; _Late after `timeout_s`, even if it swallows its cancellation."""
        name = method.__name__

        def set_late() -> None:
            if not self.late.done():
                self.late.set_result(None)

        alarm = asyncio.get_running_loop().call_later(timeout_s, set_late)
        try:
            async with asyncio.timeout(timeout_s) as clock:
                result = await timed(
                    method(*arguments),
                    lambda: self.describe_call(name),
                    lambda interval_s: self.add_interval(name, interval_s),
                )
        except (Exception, asyncio.CancelledError):
            if not clock.expired():
                raise
        finally:
            alarm.cancel()
        if _is_cancelling():  # the environment swallowed the exception
            raise asyncio.CancelledError
        if clock.expired():
            raise _Late(f"no answer within {timeout_s:g} s")
        return result

    def add_interval(self, method: str, interval_s: float) -> None:
        self.agent.watch.add(self.env_name(), method, interval_s)
        if interval_s >= BLOCKED_S:
            self.blocked_s += interval_s

    def describe_call(self, method: str) -> str:
        if self.env is None:
            return "the environment's __init__"
        return f"environment {self.env_name()}: {method}()"

    def env_name(self) -> str:
        return "(not constructed)" if self.env is None else type(self.env).__name__

    def render(self, method: Callable, *arguments):
        """Messages that cannot be rendered or encoded are an error of the environment."""
        try:
            with watched(
                lambda: f"environment {self.env_name()}: the chat template, on its messages,"
            ):
                return method(*arguments)
        except Exception as error:
            raise _failure(StopReason.ENV_ERROR, describe(error)) from None

    async def encode(self, history: History, new: list[Message]) -> None:
        """Encode the history; long new messages in a thread, outside the event loop."""
        if sum(len(message["content"]) for message in new) < LONG_CHARS:
            self.render(history.encode)
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(encoding_thread(), history.encode)
        except Exception as error:
            raise _failure(StopReason.ENV_ERROR, describe(error)) from None

    async def call_model(self, prompt_ids: np.ndarray) -> Step:
        agent = self.agent
        # One token less: a truncated response gets an end-of-turn token appended.
        sampling = replace(
            agent.sampling,
            max_tokens=agent.limits.max_response_tokens - 1,
            stop_token_ids=agent.renderer.stop_ids,
            seed=call_seed(agent.seed, self.group_id, self.index, len(self.steps)),
        )
        shared = common_prefix(self.sequence, prompt_ids)
        try:
            generation = await agent.generate(
                prompt_ids,
                sampling,
                session=self.session,
                routing_start=self.recorded.tokens(prompt_ids, shared),
                routing_version=self.recorded.version,
            )
        except (Exception, asyncio.CancelledError) as error:
            _reraise_own_cancellation(error)
            raise _failure(StopReason.ENGINE_ERROR, describe(error)) from None
        step = make_step(len(self.steps), prompt_ids, generation, agent.renderer)
        if self.steps:
            step.share_prefix(self.steps[-1], shared)
        self.sequence = np.concatenate([prompt_ids, step.response_ids])
        self.recorded.add(step, generation)
        return step

    def trajectory(self, stop: _Stop) -> Trajectory:
        if stop.error is not None:
            self.metrics["error"] = stop.error
        if self.blocked_s:
            self.metrics["event_loop_blocked_s"] = round(self.blocked_s, 3)
        if self.steps:
            self.steps[-1].last = True
            self.steps[-1].finish = stop.finish or self.steps[-1].finish
        return Trajectory(
            self.group_id,
            self.index,
            self.steps,
            stop.reason,
            self.metrics,
            sampling=self.agent.sampling.distribution,
        )

    async def close(self) -> None:
        env = self.env
        if env is None:
            return

        async def close() -> None:
            await call_method(env, "close")

        try:
            await self.limited(CLOSE_TIMEOUT_S, close)
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            # The episode is over: its stop reason and rewards stand.
            _reraise_own_cancellation(error)
            self.metrics.setdefault("error", f"close: {describe(error)}")


def make_step(
    index: int, prompt_ids: np.ndarray, generation: Generation, renderer: Renderer
) -> Step:
    """A generation as a step; a truncated one gets an end-of-turn token outside the loss mask."""
    ids = generation.ids  # [R] i32
    logprobs = generation.logprobs  # [R] f32
    versions = generation.versions  # [V, 2] i32
    loss_mask = np.ones(len(ids), bool)  # [R]
    is_complete = len(ids) > 0 and ids[-1] in renderer.stop_ids
    if generation.finish != FinishReason.ABORT and not is_complete:
        ids = np.append(ids, np.int32(renderer.end_id))
        logprobs = np.append(logprobs, np.float32(0))
        loss_mask = np.append(loss_mask, False)
        versions = versions.copy() if len(versions) else np.array([[0, 0]], np.int32)
        versions[-1, 1] += 1  # counted with the last sampled token
    return Step(
        index=index,
        last=False,
        prompt_ids=prompt_ids,
        response_ids=ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        finish=generation.finish,
        routing=generation.routing,
        routing_start=generation.routing_start,
    )


@dataclass
class Recorded:
    """Steps of a trajectory whose routing the next call need not record again, all of one weight
    version."""

    version: int | None = None
    steps: list[Step] = field(default_factory=list)

    def tokens(self, prompt_ids: np.ndarray, shared: int | None = None) -> int:
        """Number of leading prompt tokens with recorded routing, without the last prompt token,
        which the engine always computes. `shared`: those of the latest step, if they are known."""
        return recorded_tokens(self.steps, prompt_ids, len(prompt_ids) - 1, shared)

    def add(self, step: Step, generation: Generation) -> None:
        """A call that a weight sync interrupted, before its first token or later, has routing of
        two versions: the next call records from token 0."""
        versions = set(generation.versions[:, 0].tolist())
        same_version = versions == {self.version}
        starts_version = len(versions) == 1 and step.routing_start == 0
        if not same_version:
            self.steps = []
            self.version = versions.pop() if starts_version else None
        if same_version or starts_version:
            self.steps.append(step)


def call_seed(seed: int | str, group_id: int, index: int, turn: int) -> int:
    """A hash of the call's identity: reproducible, and independent between calls."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{index}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # fits an int64


def _reraise_own_cancellation(error: BaseException) -> None:
    """Raise `error` if it cancels the episode; one that leaks from a client is a failure."""
    if isinstance(error, asyncio.CancelledError) and _is_cancelling():
        raise error


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
