"""S1, S7, S8, S9, S10: the trajectory of an episode, for any environment and engine behaviour."""

import asyncio
import pickle
import re
import threading
import time

import numpy as np
import pytest

from megastep.rollout import watch
from megastep.rollout.agent import Agent, Limits, Recorded, call_seed
from megastep.rollout.env import Env, Outcome
from megastep.rollout.generation import Generation, Sampling
from megastep.rollout.renderer import Renderer
from megastep.samples.metrics import rollout_metrics
from megastep.samples.validation import validate
from megastep.types import Group

from . import chats

THINKING = "<think>\nall hell\n</think>\n\nab<|im_end|>"
LIMITS = Limits(max_turns=8, max_prompt_tokens=200, max_response_tokens=40, env_timeout_s=5.0)


class Talk(Env):
    """Returns `observations` in turn, then is done with reward 1; a callable replaces step()."""

    closed = 0

    def __init__(self, *observations, question="ab?"):
        self.question = question
        self.observations = observations
        self.turn = 0
        self.turns = []

    async def start(self):
        return [{"role": "user", "content": self.question}]

    async def step(self, text, ids):
        self.turns.append((text, ids))
        self.turn += 1
        if self.turn > len(self.observations):
            return Outcome(reward=1.0, done=True, metrics={"success": True})
        observation = self.observations[self.turn - 1]
        if callable(observation):
            return await observation()
        return Outcome(
            [{"role": "user", "content": observation}],
            reward=0.25,
            metrics={"turns": self.turn},
            state=self.turn,
        )

    async def close(self):
        self.closed += 1


def run_episode(
    env, replies=(THINKING,), mode="tokens", limits=LIMITS, routing=False, kind="qwen3"
):
    renderer = Renderer(chats.tokenizer(kind), mode)
    script = chats.ScriptedEngine(renderer, list(replies), routing)
    agent = Agent(script, renderer, limits, Sampling(max_tokens=0), seed=7)
    trajectory = asyncio.run(agent.run_episode(lambda: env, group_id=4, index=2, session="4/2"))
    validate([Group(4, [trajectory])])
    return trajectory, script, renderer


@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_s1_every_model_call_is_a_step(mode):
    env = Talk("one", "two")
    trajectory, script, renderer = run_episode(env, mode=mode)
    assert (trajectory.group_id, trajectory.index, trajectory.stop_reason) == (4, 2, "done")
    assert len(trajectory.steps) == len(script.calls) == 3 and env.closed == 1
    for step, (prompt, _, session, _) in zip(trajectory.steps, script.calls):
        assert step.prompt_ids.tolist() == prompt.tolist() and session == "4/2"
        assert step.response_ids.tolist() == chats.ids(renderer, THINKING).tolist()
        assert step.logprobs.tolist() == [-(i + 1) for i in range(len(step.response_ids))]
        assert step.versions.tolist() == [[3, len(step.response_ids)]] and step.finish == "stop"
    assert [s.reward for s in trajectory.steps] == [0.25, 0.25, 1.0] and trajectory.reward == 1.5
    assert trajectory.env_metrics == {"turns": 2, "success": True}
    assert [s.state for s in trajectory.steps] == [None, 1, 2]
    assert env.turns[0][0] == THINKING.removesuffix("<|im_end|>")


@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_s9_an_observation_is_in_the_next_prompt_and_in_no_response(mode):
    trajectory, _, renderer = run_episode(Talk("seventy-one", "two"), mode=mode)
    seen = [renderer.tokenizer.decode(s.prompt_ids).count("seventy-one") for s in trajectory.steps]
    assert seen == [0, 1, 1]
    assert all(
        "seventy-one" not in renderer.tokenizer.decode(s.response_ids) for s in trajectory.steps
    )


def test_max_turns():
    trajectory, _, _ = run_episode(Talk("one", "two", "three"), limits=Limits(2, 200, 40, 5.0))
    assert (len(trajectory.steps), trajectory.stop_reason) == (2, "max_turns")
    assert [s.last for s in trajectory.steps] == [False, True]


# ---------------------------------------------------------------- S7: lengths


@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_s7_no_prompt_is_longer_than_the_limit(mode):
    """Seven turns, growing observations: a limit keeps the steps of the free episode that fit."""
    observations = ["x" * n for n in range(1, 30, 5)]
    free, _, _ = run_episode(Talk(*observations), mode=mode, limits=Limits(8, 10_000, 40, 5.0))
    lengths = [len(s.prompt_ids) for s in free.steps]
    assert len(lengths) == 7
    for limit in [n + d for n in lengths for d in (-1, 0, 1)][1:]:
        trajectory, script, _ = run_episode(
            Talk(*observations), mode=mode, limits=Limits(8, limit, 40, 5.0)
        )
        fitting = [s for s in free.steps if len(s.prompt_ids) <= limit]
        assert all(len(prompt) <= limit for prompt, *_ in script.calls)
        assert [s.prompt_ids.tolist() for s in trajectory.steps] == [
            s.prompt_ids.tolist() for s in fitting
        ]
        if len(fitting) < len(free.steps):
            assert trajectory.stop_reason == "context"
            assert [s.finish for s in trajectory.steps] == ["stop"] * (len(fitting) - 1) + [
                "context"
            ]
        else:
            assert trajectory.stop_reason == "done" and trajectory.steps[-1].finish == "stop"


def test_s7_chat_mode_checks_the_rendered_prompt():
    """Thinking that the template dropped does not count; in tokens mode it does."""
    limits = Limits(8, 110, 40, 5.0)
    stopped = {
        mode: run_episode(Talk("x", "x", "x"), mode=mode, limits=limits)[0]
        for mode in ("tokens", "chat")
    }
    assert stopped["tokens"].stop_reason == "context" and stopped["chat"].stop_reason == "done"


def test_s7_an_over_long_first_prompt_is_a_trajectory_without_steps():
    env = Talk(question="x" * 500)
    trajectory, script, _ = run_episode(env)
    assert (trajectory.steps, trajectory.stop_reason, script.calls, env.closed) == (
        [],
        "first_prompt",
        [],
        1,
    )


@pytest.mark.parametrize("reply", ["x" * 39, "x" * 100, "x" * 38 + "<|im_end|>", THINKING])
def test_s7_no_step_is_longer_than_prompt_and_response(reply):
    trajectory, _, _ = run_episode(Talk("one"), [reply])
    assert all(len(s.response_ids) <= LIMITS.max_response_tokens for s in trajectory.steps)


# ---------------------------------------------------------------- S8: the appended end of turn


@pytest.mark.parametrize("reply", ["x" * 100, "", "ab"])
@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_s8_an_appended_eos_is_in_the_sequence_and_out_of_the_loss(reply, mode):
    trajectory, script, renderer = run_episode(Talk("one"), [reply], mode=mode)
    for step in trajectory.steps:
        sampled = min(len(chats.ids(renderer, reply)), LIMITS.max_response_tokens - 1)
        assert len(step.response_ids) == sampled + 1 and step.response_ids[-1] == renderer.end_id
        assert step.loss_mask.tolist() == [True] * sampled + [False]
        assert step.logprobs[-1] == 0 and step.finish == "length"
        assert step.versions[:, 1].sum() == sampled + 1
    if mode == "tokens":
        first, second = trajectory.steps
        sequence = [*first.prompt_ids, *first.response_ids]
        assert second.prompt_ids[: len(sequence)].tolist() == sequence


def test_s8_a_sampled_eos_is_trained_and_nothing_is_appended():
    trajectory, _, renderer = run_episode(Talk())
    (step,) = trajectory.steps
    assert step.loss_mask.all() and step.response_ids.tolist().count(renderer.end_id) == 1


# ---------------------------------------------------------------- S10: routing


def routing_by_token(step) -> list[int]:
    return step.routing[:, 0, 0].tolist()


@pytest.mark.parametrize("reply", [THINKING, "", "x" * 100])
@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_s10_routing_belongs_to_the_forwarded_tokens(reply, mode):
    trajectory, _, _ = run_episode(Talk("one", "two"), [reply], mode=mode, routing=True)
    for step in trajectory.steps:
        tokens = np.concatenate([step.prompt_ids, step.response_ids])
        # Neither the last sampled token nor the appended one is forwarded.
        forwarded = len(step.prompt_ids) + int(step.loss_mask.sum()) - 1
        assert step.routing_end == max(forwarded, step.routing_start)
        assert (
            routing_by_token(step) == (tokens[step.routing_start : step.routing_end] % 64).tolist()
        )


def test_s10_routing_is_requested_once_where_prompts_extend_each_other():
    trajectory, script, _ = run_episode(Talk("one", "two", "three"), mode="tokens", routing=True)
    end = 0
    for step, (_, _, _, asked) in zip(trajectory.steps, script.calls):
        assert asked == step.routing_start == end
        end = step.routing_end
    shipped = sum(len(s.routing) for s in trajectory.steps)
    assert shipped == len(trajectory.steps[-1]) - 1  # every token but the last, once


def test_s10_routing_of_a_rewritten_history_is_requested_from_the_first_difference():
    trajectory, script, _ = run_episode(Talk("one", "two"), mode="chat", routing=True)
    first, second, third = trajectory.steps
    assert script.calls[0][3] == 0
    # The template rewrote the whole answer: the common prefix is the first prompt.
    assert script.calls[1][3] == len(first.prompt_ids)
    # The second prompt is a prefix of the third.
    assert third.prompt_ids[: len(second.prompt_ids)].tolist() == second.prompt_ids.tolist()
    assert script.calls[2][3] == len(second.prompt_ids)


def test_s10_routing_that_no_step_recorded_is_requested():
    trajectory, script, _ = run_episode(Talk("one", "two"), routing=False)
    assert [asked for *_, asked in script.calls] == [0, 0, 0] and all(
        s.routing is None for s in trajectory.steps
    )


def test_s10_the_last_token_of_a_prompt_is_always_computed():
    trajectory, _, _ = run_episode(Talk(), routing=True)
    (step,) = trajectory.steps
    prompt = np.concatenate([step.prompt_ids, step.response_ids])[:-3]
    assert Recorded(3, [step]).tokens(prompt) == len(prompt) - 1


# ---------------------------------------------------------------- A12: routing across a weight sync


def engine_steps(versions, queued=()):
    """Three turns that extend each other. `versions[i]`: weight versions of turn i, one per sampled
    token, the last for the rest. A turn in `queued` was sent before the sync that changed its
    version: the engine records from the requested start."""
    renderer = Renderer(chats.tokenizer("qwen3"), "tokens")
    script = chats.ScriptedEngine(renderer, [THINKING], routing=True)
    asked = []

    async def generate(prompt_ids, sampling, *, session, routing_start, routing_version):
        turn = len(asked)
        asked.append((routing_start, routing_version))
        known = routing_start if routing_version == versions[turn][0] or turn in queued else 0
        made = await script(prompt_ids, sampling, session=session, routing_start=known)
        runs = [[v, 1] for v in versions[turn][:-1]]
        made.versions = np.array([*runs, [versions[turn][-1], len(made.ids) - len(runs)]], np.int32)
        return made

    agent = Agent(generate, renderer, LIMITS, Sampling(max_tokens=0), seed=7)
    trajectory = asyncio.run(
        agent.run_episode(lambda: Talk("one", "two"), group_id=4, index=2, session="4/2")
    )
    validate([Group(4, [trajectory])])
    return trajectory, asked


def test_a12_routing_is_recorded_once_per_weight_version():
    trajectory, asked = engine_steps([[3], [3], [3]])
    assert asked[0] == (0, None) and [version for _, version in asked[1:]] == [3, 3]
    first, second, third = trajectory.steps
    assert (second.routing_start, third.routing_start) == (first.routing_end, second.routing_end)
    assert rollout_metrics([Group(4, [trajectory])])["turn/older_routing"] == 0


def test_a12_after_a_weight_sync_a_call_records_its_whole_context():
    trajectory, asked = engine_steps([[3], [4], [4]])
    first, second, third = trajectory.steps
    # The engine has version 4 by then.
    assert asked[1] == (first.routing_end, 3) and second.routing_start == 0
    assert asked[2] == (second.routing_end, 4) and third.routing_start == second.routing_end
    assert rollout_metrics([Group(4, [trajectory])])["turn/older_routing"] == 0


def test_a12_routing_of_an_interrupted_call_is_not_reused():
    """Its prompt has the routing of version 3, its last tokens that of version 4."""
    _, asked = engine_steps([[3], [3, 4], [4]])
    assert asked[2] == (0, None)


def test_a12_routing_of_a_call_queued_during_a_sync_is_counted_and_not_reused():
    trajectory, asked = engine_steps([[3], [4], [4]], queued={1})
    first, second, third = trajectory.steps
    assert second.routing_start == first.routing_end
    assert asked[2] == (0, None) and third.routing_start == 0
    assert rollout_metrics([Group(4, [trajectory])])["turn/older_routing"] == 1


# ---------------------------------------------------------------- failures


async def raises():
    raise KeyError("no such table")


async def hangs():
    await asyncio.sleep(60)


async def own_timeout():
    raise TimeoutError("the tool's own")


async def leaks():
    raise asyncio.CancelledError("of the tool's own client")


async def exits():
    raise SystemExit(2)


def returns(value):
    async def answer():
        return value

    return answer


GARBAGE = [
    None,
    "text",
    Outcome("text"),
    Outcome([{"role": "user"}]),
    Outcome(reward=float("nan")),
    Outcome(reward="much"),
    Outcome(metrics={"x": object()}),
    Outcome(state="here"),
    (1, 2),
    Outcome(state=2**70),
    Outcome(state=-(2**63) - 1),
    Outcome(state=1.5),
    Outcome(metrics={"success": "no"}),
    Outcome(metrics={"success": None}),
    Outcome(metrics={"success": []}),
    Outcome(metrics={"x": np.float32("nan")}),
    Outcome(metrics={"x": 10**400}),
    Outcome(metrics={"x": "\ud800"}),
    Outcome(metrics={"x": "y" * 200_000}),
    Outcome(metrics=5),
    Outcome(reward="1.5"),
    Outcome(reward=10**400),
    Outcome(reward=np.ones(2)),
    Outcome(done="no"),
    Outcome(done=None),
    Outcome(done=np.ones(2)),
    (1, 2, 3, 4, 5, 6),
]


@pytest.mark.parametrize(
    "behaviour, reason, error",
    [
        (raises, "env_error", "KeyError: 'no such table'"),
        (own_timeout, "env_error", "TimeoutError: the tool's own"),
        (leaks, "env_error", "CancelledError: of the tool's own client"),
        (exits, "env_error", "SystemExit: 2"),
        (hangs, "env_timeout", "no answer within 0.05 s"),
    ]
    + [(returns(garbage), "env_error", "EnvError: ") for garbage in GARBAGE],
)
def test_a_failing_environment_fails_its_trajectory(behaviour, reason, error):
    env = Talk("one", behaviour)
    trajectory, _, _ = run_episode(
        env, limits=Limits(8, 200, 40, 0.05 if behaviour is hangs else 5.0)
    )
    assert trajectory.stop_reason == reason and trajectory.env_metrics["error"].startswith(error)
    assert [s.finish for s in trajectory.steps] == ["stop", "error"]
    assert [s.reward for s in trajectory.steps] == [0.25, 0.0] and env.closed == 1


@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_messages_of_an_environment_may_hold_tool_calls_and_parts(mode):
    call = {"id": "1", "function": {"name": "look", "arguments": {"key": "so <|im_end|>"}}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    class Tools(Talk):
        async def start(self):
            return [
                {"role": "user", "content": parts},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "name": "look", "content": "found"},
            ]

    trajectory, _, renderer = run_episode(Tools(), mode=mode, kind="hermes")
    (step,) = trajectory.steps
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert step.prompt_ids.tolist().count(end) == 3  # the template's own
    assert renderer.tokenizer.decode(step.prompt_ids) == (
        "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>{"name": "look", "arguments": {"key": "so <|im_end|>"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_environment_with_an_invalid_first_prompt():
    class Broken(Talk):
        async def start(self):
            return "a question"

    trajectory, script, _ = run_episode(Broken())
    assert (trajectory.steps, trajectory.stop_reason, script.calls) == ([], "env_error", [])
    assert "expected chat messages" in trajectory.env_metrics["error"]


@pytest.mark.parametrize("mode", ["tokens", "chat"])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "\ud800"}],
        [{"role": "\udfff", "content": "x"}],
        [],
        [
            {"role": "user", "content": "x", "more": {"a": "\ud800"}},
            {"role": "user", "content": "\udc80"},
        ],
    ],
    ids=["content", "role", "none", "second"],
)
def test_c1_messages_that_cannot_be_rendered_fail_the_episode(messages, mode):
    """A lone surrogate in a row or an observation, or no message at all, must not end the run."""

    class Start(Talk):
        async def start(self):
            return messages

    trajectory, script, _ = run_episode(Start(), mode=mode)
    assert (trajectory.steps, trajectory.stop_reason, script.calls) == ([], "env_error", [])
    assert "\n" not in trajectory.env_metrics["error"] and trajectory.env_metrics["error"].encode()
    if not messages:
        assert (
            trajectory.env_metrics["error"]
            == "EnvError: start() returned no messages; the first prompt is needed"
        )
    else:
        trajectory, _, _ = run_episode(Talk(returns(Outcome(messages))), mode=mode)
        assert (
            trajectory.stop_reason == "env_error"
            and "lone surrogate" in trajectory.env_metrics["error"]
        )


def test_c1_recursive_messages_fail_the_episode():
    endless = {"role": "user", "content": "x"}
    endless["again"] = endless
    trajectory, _, _ = run_episode(Talk(returns(Outcome([endless]))))
    assert (
        trajectory.stop_reason == "env_error"
        and "RecursionError" in trajectory.env_metrics["error"]
    )


def test_c1_an_error_that_cannot_be_printed_is_reported():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    async def mute():
        raise Mute

    async def lone_surrogate():
        raise ValueError("a\n\ud800")

    assert (
        run_episode(Talk(mute))[0].env_metrics["error"]
        == "Mute: its text cannot be read, ValueError"
    )
    assert run_episode(Talk(lone_surrogate))[0].env_metrics["error"] == "ValueError: a \\ud800"


def test_c10_numpy_scalars_are_accepted():
    outcome = Outcome(
        reward=np.float32(0.5),
        done=np.bool_(True),
        state=np.int64(7),
        metrics={
            "success": np.bool_(True),
            "n": np.int32(3),
            "x": np.float32(0.25),
            "zero_d": np.array(4),
            "list": [np.int8(1)],
        },
    )
    trajectory, _, _ = run_episode(
        Talk(returns(outcome._replace(done=np.bool_(False))), returns(outcome))
    )
    assert trajectory.stop_reason == "done" and trajectory.reward == 1.0
    assert trajectory.env_metrics == {"success": True, "n": 3, "x": 0.25, "zero_d": 4, "list": [1]}
    assert trajectory.steps[1].state == 7 and type(trajectory.steps[1].state) is int
    assert trajectory.env_metrics["success"] is True


@pytest.mark.parametrize("state", [2**63 - 1, -(2**63), 0, True])
def test_c10_states_of_64_bits_are_kept(state):
    trajectory, _, _ = run_episode(Talk(returns(Outcome(state=state))))
    assert trajectory.stop_reason == "done" and trajectory.steps[1].state == state


@pytest.mark.parametrize("method", ["start", "step", "close"])
def test_c10_the_error_for_a_method_without_async_shows_its_signature(method):
    env = Talk()
    setattr(env, method, lambda *_: [])
    trajectory, _, _ = run_episode(env)
    written = {"start": "start(self)", "step": "step(self, text, ids)", "close": "close(self)"}[
        method
    ]
    error = f"EnvError: Talk.{method} is not async; write async def {written}"
    assert trajectory.env_metrics["error"].removeprefix("close: ") == error
    assert trajectory.stop_reason == ("done" if method == "close" else "env_error")


# ---------------------------------------------------------------- C11: blocking environments


def test_c11_an_observation_above_the_limit_is_an_error():
    limits = Limits(8, 200, 40, 5.0, max_observation_chars=1004)
    at_limit, _, _ = run_episode(Talk("x" * 1000), limits=limits)  # `user` counts
    above, _, _ = run_episode(Talk("x" * 1001), limits=limits)
    first, _, _ = run_episode(Talk(question="x" * 1001), limits=limits)
    assert at_limit.stop_reason == "context"
    for trajectory in (above, first):
        assert trajectory.stop_reason == "env_error"
        error = "EnvError: messages of 1005 characters; rollout.max_observation_chars = 1004"
        assert trajectory.env_metrics["error"] == error


async def ignores_cancellation():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass


@pytest.fixture
def short_timeouts(monkeypatch):
    monkeypatch.setattr("megastep.rollout.agent.CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("megastep.rollout.agent.CANCEL_TIMEOUT_S", 0.1)


def test_c11_an_environment_that_swallows_its_cancellation_is_abandoned(short_timeouts, capsys):
    """`asyncio.run` would wait for its task forever."""
    begin = time.monotonic()
    env = Talk("one", ignores_cancellation)
    trajectory, _, _ = run_episode(env, limits=Limits(8, 200, 40, 0.05))
    assert time.monotonic() - begin < 5
    assert trajectory.stop_reason == "env_timeout" and len(trajectory.steps) == 2
    assert trajectory.env_metrics["error"] == "it ignored its cancellation"
    assert (
        "warning: environment Talk: ignored its cancellation and is abandoned"
        in capsys.readouterr().err
    )


def test_c11_an_environment_that_never_closes_keeps_its_trajectory(short_timeouts, capsys):
    env = Talk()
    env.close = ignores_cancellation
    trajectory, _, _ = run_episode(env)
    assert trajectory.stop_reason == "done" and trajectory.reward == 1
    assert "environment Talk: ignored its cancellation" in capsys.readouterr().err


@pytest.mark.parametrize("swallows", ["always", "once"])
def test_c11_a_cancelled_episode_ends_even_if_its_environment_does_not(swallows, short_timeouts):
    async def once():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return Outcome([{"role": "user", "content": "on"}])

    async def run():
        renderer = Renderer(chats.tokenizer("qwen3"), "tokens")
        script = chats.ScriptedEngine(renderer, [THINKING])
        env = Talk(ignores_cancellation if swallows == "always" else once, "two", "three")
        agent = Agent(script, renderer, LIMITS, Sampling(max_tokens=0))
        episode = asyncio.create_task(agent.run_episode(lambda: env, 0, 0, "0/0"))
        while not env.turns:
            await asyncio.sleep(0.001)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        return len(script.calls)

    begin = time.monotonic()
    assert asyncio.run(run()) == 1  # no second model call
    assert time.monotonic() - begin < 5


def test_c11_cancelling_an_episode_after_its_timeout_closes_the_environment(monkeypatch):
    monkeypatch.setattr("megastep.rollout.agent.CLOSE_TIMEOUT_S", 20.0)
    is_late = asyncio.Event()

    async def slow_to_end():
        try:
            await asyncio.sleep(60)
        finally:
            is_late.set()
            await asyncio.sleep(60)

    class SlowToClose(Talk):
        async def close(self):
            await asyncio.sleep(0.1)
            await super().close()

    async def run():
        renderer = Renderer(chats.tokenizer("qwen3"), "tokens")
        env = SlowToClose(slow_to_end)
        limits = Limits(8, 200, 40, env_timeout_s=0.05)
        agent = Agent(
            chats.ScriptedEngine(renderer, [THINKING]), renderer, limits, Sampling(max_tokens=0)
        )
        episode = asyncio.create_task(agent.run_episode(lambda: env, 0, 0, "0/0"))
        await is_late.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        return env.closed, len(asyncio.all_tasks())

    assert asyncio.run(run()) == (1, 1)


def test_c11_an_environment_that_cancels_its_task_fails_its_trajectory():
    async def cancels():
        asyncio.current_task().cancel()
        await asyncio.sleep(1)

    trajectory, _, _ = run_episode(Talk("one", cancels))
    assert (
        trajectory.stop_reason == "env_error"
        and trajectory.env_metrics["error"] == "it cancelled its own task"
    )


def test_c11_one_task_makes_all_calls_of_an_environment():
    """A cancel scope opened in start() can be closed in close() by the same task only."""
    tasks = []

    class Scoped(Talk):
        async def start(self):
            tasks.append(asyncio.current_task())
            return await super().start()

        async def step(self, text, ids):
            tasks.append(asyncio.current_task())
            return await super().step(text, ids)

        async def close(self):
            tasks.append(asyncio.current_task())

    run_episode(Scoped("one"))
    assert len(tasks) == 4 and len(set(tasks)) == 1


def test_c11_a_warning_names_the_method_that_blocks_the_event_loop(capsys):
    async def sleeps():
        await asyncio.sleep(0.01)
        time.sleep(0.6)
        return Outcome([{"role": "user", "content": "on"}])

    async def waits():
        await asyncio.sleep(0.6)
        return Outcome([{"role": "user", "content": "on"}])

    patient, _, _ = run_episode(Talk(waits))
    assert patient.env_metrics == {"success": True} and capsys.readouterr().err == ""
    trajectory, _, _ = run_episode(Talk(sleeps, sleeps))
    assert 1.2 <= trajectory.env_metrics["event_loop_blocked_s"] < 30
    (line,) = capsys.readouterr().err.splitlines()  # once
    found = re.match(
        r"warning: environment Talk: step\(\) blocked the event loop for (\S+) s, and",
        line,
    )
    assert found and float(found[1]) >= 0.6


@pytest.fixture
def warnings(monkeypatch):
    """The warnings of the watch thread, which checks every 10 ms here."""
    monkeypatch.setattr(watch, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(watch, "WARN_AFTER_S", (0.2, 0.6))
    lines = []
    monkeypatch.setattr(watch, "warn", lines.append)
    return lines


def blocks_until(condition) -> None:
    """Busy-waits in the event loop, at most 30 s."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        pass


@pytest.mark.parametrize(
    "where, who",
    [
        ("made", "the environment's __init__ has"),
        ("start", "environment Stuck: start() has"),
        ("step", "environment Stuck: step() has"),
        ("close", "environment Stuck: close() has"),
        ("template", "environment Stuck: the chat template, on its messages, has"),
    ],
)
def test_c11_a_blocked_interval_is_reported_while_it_lasts(where, who, warnings, monkeypatch):
    at = []

    def stuck(here: str) -> None:
        if here == where:
            blocks_until(lambda: len(warnings) >= 2)
            at.append(list(warnings))

    class Stuck(Talk):
        def __init__(self):
            stuck("made")
            super().__init__()

        async def start(self):
            stuck("start")
            return await super().start()

        async def step(self, text, ids):
            await asyncio.sleep(0)
            stuck("step")
            return await super().step(text, ids)

        async def close(self):
            stuck("close")

    renderer = Renderer(chats.tokenizer("qwen3"), "tokens")
    begin = renderer.begin
    monkeypatch.setattr(renderer, "begin", lambda messages: stuck("template") or begin(messages))
    agent = Agent(
        chats.ScriptedEngine(renderer, [THINKING]),
        renderer,
        Limits(8, 200, 40, 60.0),
        Sampling(max_tokens=0),
    )
    asyncio.run(agent.run_episode(Stuck, 0, 0, "0/0"))
    ((first, again),) = at
    assert first.startswith(f"{who} blocked the event loop for ") and again.startswith(who)
    # Possibly a third one, by LoopWatch, after the interval has ended.
    assert warnings[2:] == [] or "every other episode waited" in warnings[2]


def test_c11_awaiting_is_not_reported(warnings):
    async def waits():
        await asyncio.sleep(1.0)
        return Outcome([{"role": "user", "content": "on"}])

    run_episode(Talk(waits))
    assert not any("step()" in line for line in warnings) and not watch._current


def test_c11_many_short_blocked_intervals_are_reported(capsys, monkeypatch):
    monkeypatch.setattr("megastep.rollout.watch.WINDOW_S", 0.2)

    async def sleeps():
        time.sleep(0.1)
        return Outcome([{"role": "user", "content": "on"}])

    run_episode(Talk(sleeps, sleeps, sleeps, sleeps))
    assert "warning: environment Talk: blocked the event loop for 0." in capsys.readouterr().err


def test_an_observation_that_the_template_rejects():
    trajectory, _, _ = run_episode(
        Talk(returns(Outcome([{"role": "tool", "content": "1"}]))),
        kind="gpt_oss",
        replies=["<|channel|>final<|message|>ab<|return|>"],
    )
    assert (
        trajectory.stop_reason == "env_error"
        and "rejects messages" in trajectory.env_metrics["error"]
    )


@pytest.mark.parametrize(
    "error", [OSError("busy"), asyncio.CancelledError("busy"), SystemExit("busy")], ids=repr
)
def test_an_environment_that_cannot_close_keeps_its_trajectory(error):
    class Sticky(Talk):
        async def close(self):
            raise error

    trajectory, _, _ = run_episode(Sticky())
    assert (
        trajectory.stop_reason == "done"
        and trajectory.env_metrics["error"] == f"close: {type(error).__name__}: busy"
    )


def test_a_failing_engine_fails_the_trajectory():
    trajectory, _, _ = run_episode(Talk("one"), [THINKING, RuntimeError("engine 0 died")])
    assert trajectory.stop_reason == "engine_error" and len(trajectory.steps) == 1
    assert (
        trajectory.steps[0].finish == "error" and "engine 0 died" in trajectory.env_metrics["error"]
    )


def test_an_aborted_call_keeps_its_sampled_tokens():
    renderer = Renderer(chats.tokenizer("qwen3"), "tokens")

    async def abort(prompt_ids, sampling, *, session, **_):
        return Generation(
            np.array([1], np.int32), np.zeros(1, np.float32), np.array([[0, 1]], np.int32), "abort"
        )

    agent = Agent(abort, renderer, LIMITS, Sampling(max_tokens=0))
    env = Talk("one")
    trajectory = asyncio.run(agent.run_episode(lambda: env, 0, 0, "0/0"))
    assert trajectory.stop_reason == "abort" and env.turns == [] and env.closed == 1
    assert (
        trajectory.steps[0].response_ids.tolist() == [1] and trajectory.steps[0].finish == "abort"
    )


# ---------------------------------------------------------------- sampling


def test_sampling_parameters_of_each_call():
    _, script, renderer = run_episode(Talk("one"))
    for turn, (_, sampling, _, _) in enumerate(script.calls):
        assert sampling.max_tokens == LIMITS.max_response_tokens - 1
        assert sampling.stop_token_ids == renderer.stop_ids
        assert sampling.seed == call_seed(7, 4, 2, turn)


def test_every_call_has_a_distinct_seed():
    seeds = {call_seed(*key) for key in np.ndindex(3, 3, 3, 3)}
    assert len(seeds) == 81 and all(0 <= s < 2**62 for s in seeds)
    assert call_seed(1, 2, 3, 4) == call_seed(1, 2, 3, 4)


# ---------------------------------------------------------------- tokens once


@pytest.mark.parametrize("mode, kind", [("tokens", "qwen3"), ("chat", "qwen3"), ("chat", "llama3")])
def test_the_steps_of_an_episode_store_each_token_once(mode, kind):
    """The size of a trajectory grows with its turns; qwen3 drops the thinking of each of them."""
    replies = [chats.EOS[kind].join(["<think>\nall hell\n</think>\n\nab" * 20, ""])]
    limits = Limits(
        max_turns=50, max_prompt_tokens=10**6, max_response_tokens=10**4, env_timeout_s=9
    )
    sizes = []
    for turns in (20, 40):
        env = Talk(*["hello there " * 40] * (turns - 1))
        trajectory, script, _ = run_episode(env, replies, mode, limits, kind=kind)
        assert len(trajectory.steps) == turns
        for step, (prompt, *_) in zip(trajectory.steps, script.calls):
            assert step.prompt_ids.tolist() == prompt.tolist()
        sizes.append(len(pickle.dumps(trajectory)))
    assert sizes[1] < 2.2 * sizes[0]


@pytest.mark.parametrize("mode", ["tokens", "chat"])
def test_s6_long_messages_are_encoded_in_a_thread_and_once_for_all_samples(mode, monkeypatch):
    renderer = Renderer(chats.tokenizer("qwen3"), mode)
    script = chats.ScriptedEngine(renderer, ["ab<|im_end|>"])
    limits = Limits(3, 10**6, 40, 60.0)
    agent = Agent(script, renderer, limits, Sampling(max_tokens=0))
    encoder = renderer.encoder
    encode = encoder._encode
    threads = {}

    def counted(segment: str):
        threads.setdefault(segment, []).append(threading.current_thread().name)
        return encode(segment)

    monkeypatch.setattr(encoder, "_encode", counted)
    question = "abc " * 10_000
    observed = "xyz " * 10_000

    async def samples():
        env = [Talk("short", observed, question=question) for _ in range(4)]
        runs = [agent.run_episode(lambda i=i: env[i], 0, i, f"0/{i}") for i in range(4)]
        return await asyncio.gather(*runs)

    trajectories = asyncio.run(samples())
    by_length = {len(segment): names for segment, names in threads.items()}
    for text in (f"user\n{question}", f"user\n{observed}"):
        (name,) = by_length[len(text)]  # one encoding
        assert name.startswith("encoding")
    main = threading.current_thread().name
    assert all(names == [main] for length, names in by_length.items() if length < 100)
    for trajectory in trajectories:
        assert trajectory.stop_reason == "done" and len(trajectory.steps) == 3
        messages = [{"role": "user", "content": question}]
        assert trajectory.steps[0].prompt_ids.tolist() == renderer.prompt_ids(messages).tolist()


def test_a_long_message_that_cannot_be_encoded_is_an_error_of_the_environment():
    trajectory, _, _ = run_episode(Talk(question="\ud83d" * 20_000))
    assert trajectory.stop_reason == "env_error"
    assert "lone surrogate" in trajectory.env_metrics["error"]
