"""D3, S10: many engines behind one `generate`: together by session, balanced, restarted, each call answered once."""

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import OutOfMemoryError

from megastep.config import EngineConfig
from megastep.errors import EngineError
from megastep.rollout.engine import run_lengths
from megastep.rollout.fleet import Fleet
from megastep.rollout.generation import Sampling
from tests.engines import GREEDY, export, shake
from tests.models import some_tokens
from tests.processes import alive, descendants, wait_for


def test_run_lengths():
    assert run_lengths([[3, 0], [4, 5]], 8).tolist() == [[3, 5], [4, 3]]
    assert run_lengths([[3, 0], [4, 0]], 8).tolist() == [
        [4, 8]
    ]  # began before the push, sampled after it
    assert run_lengths([[3, 0]], 0).shape == (0, 2)


def test_an_engine_that_ray_kills_for_want_of_memory_is_lost(monkeypatch):
    """Ray raises something else then than for an actor that died."""

    class Handle:
        def __getattr__(self, method):
            return self

        async def remote(self, *arguments):
            raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory")

    monkeypatch.setattr("ray.kill", lambda handle: None)
    fleet = Fleet(lambda index: Handle(), EngineConfig(health_every_s=0.01, restarts=0))
    try:
        fleet.open()
        wait_for(lambda: fleet._all_gone(), 10)
        with pytest.raises(
            EngineError, match="every engine is gone: 0: its process ended: Ray killed it because"
        ):
            asyncio.run(fleet.generate(np.zeros(1), GREEDY, session="any"))
    finally:
        fleet.close()


def test_an_engine_that_does_not_start_is_waited_for_as_long_as_the_config_says(monkeypatch):
    """engine.start_timeout_s"""

    class Handle:
        def __getattr__(self, method):
            return self

        async def remote(self, *arguments):
            await asyncio.sleep(1000)

    monkeypatch.setattr("ray.kill", lambda handle: None)
    fleet = Fleet(lambda index: Handle(), EngineConfig(start_timeout_s=1))
    try:
        starting = asyncio.run_coroutine_threadsafe(fleet._start(), fleet._loop)
        with pytest.raises(
            EngineError, match="engine 0 did not start in engine.start_timeout_s = 1"
        ):
            starting.result(timeout=30)
    finally:
        fleet.close()


# ---------------------------------------------------------------- real engines


def test_calls_of_a_session_stay_together(rollouts):
    sessions = [f"s{i}" for i in range(8)]
    prompts = some_tokens(8)
    placed = []
    for turn in range(3):
        order = (
            sessions if turn == 0 else sessions[turn:] + sessions[:turn]
        )  # who asks first would go to engine 0
        rollouts.ask(prompts, sessions=order)
        placed.append([rollouts.fleet._sessions[s].index for s in sessions])
    assert placed[0] == placed[1] == placed[2] and sorted(placed[0]) == [0] * 4 + [1] * 4


def test_s10_experts_come_as_asked(rollouts):
    """P + R - 1 tokens have experts; of a second turn only those that the first has not recorded."""
    (first,) = rollouts.ask(some_tokens(1), sessions=["turns"])
    assert first.routing.shape == (16 + 12 - 1, 4, 2) and first.routing.dtype == np.uint8
    prompt = np.concatenate([some_tokens(1)[0].numpy(), first.ids, [1, 2, 3]])
    known = len(first.routing)
    (second,) = rollouts.ask([prompt], sessions=["turns"], routing_start=known)
    (whole,) = rollouts.ask([prompt], sessions=["turns"])
    assert second.routing_start == known and len(second.routing) == len(prompt) + 12 - 1 - known
    assert np.array_equal(whole.routing[known:], second.routing)
    assert np.array_equal(whole.routing[:known], first.routing)


def test_a12_after_a_weight_sync_the_whole_context_is_recorded_again(rollouts, models, tmp_path):
    """With the weights that an earlier call had, a call records what is new; with others, all, and so does one that
    comes while the engines are paused for them."""
    _policy(rollouts, models, tmp_path / "hf")
    (first,) = rollouts.ask(some_tokens(1), sessions=["synced"])
    prompt = np.concatenate([some_tokens(1)[0].numpy(), first.ids, [1, 2, 3]])
    version, known = int(first.versions[0, 0]), len(first.routing)
    earlier = dict(sessions=["synced"], routing_start=known, routing_version=version)
    (same,) = rollouts.ask([prompt], **earlier)
    assert same.versions[0, 0] == version and same.routing_start == known

    rollouts.on_ranks(shake, 9)
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(rollouts.ask([prompt], **earlier)))
    rollouts.fleet.pause()
    thread.start()
    time.sleep(0.3)
    synced = rollouts.cluster.policy.sync_weights(rollouts.fleet.serving())
    assert not answers
    rollouts.fleet.resume()
    thread.join()
    (paused,), (after,) = answers, rollouts.ask([prompt], **earlier)
    for made in (paused, after):
        assert made.versions.tolist() == [[synced, 12]] and synced != version
        assert made.routing_start == 0 and len(made.routing) == len(prompt) + 12 - 1
    assert np.array_equal(paused.routing, after.routing)


def test_logprobs_are_those_of_the_distribution_sampled_from(rollouts, models, tmp_path):
    model = _policy(rollouts, models, tmp_path / "hf")
    prompts = some_tokens(2)
    for sampling in (
        Sampling(20, temperature=0.5, seed=1),
        Sampling(20, temperature=1.5, top_k=5, seed=2),
    ):
        for prompt, generation in zip(prompts, rollouts.ask(prompts, sampling)):
            logits = _logits(model, prompt, generation.ids) / sampling.temperature
            if sampling.top_k:
                floor = logits.topk(sampling.top_k).values[:, -1:]
                logits = logits.masked_fill(logits < floor, -torch.inf)
            assert np.isfinite(generation.logprobs).all()
            np.testing.assert_allclose(generation.logprobs, _of(logits, generation.ids), atol=1e-3)


def test_a_seed_gives_the_same_tokens_on_any_engine(rollouts):
    prompt = some_tokens(1)[0]
    sampled = rollouts.ask([prompt] * 4, Sampling(16, seed=5)) + rollouts.ask(
        [prompt] * 2, Sampling(16, seed=6)
    )
    ids = [tuple(g.ids.tolist()) for g in sampled]
    assert len(set(ids[:4])) == 1 and len(set(ids)) == 2


def test_seeded_calls_with_more_prompt_tokens_than_a_batch(rollouts):
    prompts = some_tokens(80, length=240)
    assert [len(g.ids) for g in rollouts.ask(prompts, Sampling(4, seed=5))] == [4] * 80


def test_a_stop_token_ends_the_response_and_is_its_last(rollouts):
    (free,) = rollouts.ask(some_tokens(1))
    stop = int(free.ids[4])
    (stopped,) = rollouts.ask(some_tokens(1), Sampling(12, temperature=0.0, stop_token_ids=(stop,)))
    assert stopped.finish == "stop" and free.finish == "length"
    assert stopped.ids.tolist() == free.ids[: free.ids.tolist().index(stop) + 1].tolist()
    assert (
        len(stopped.logprobs) == len(stopped.ids)
        and len(stopped.routing) == 16 + len(stopped.ids) - 1
    )


def test_an_impossible_call_is_refused_in_one_line(rollouts):
    with pytest.raises(EngineError, match="an engine refused a call: .*256") as error:
        rollouts.ask(some_tokens(1, length=300))
    assert "\n" not in str(error.value)
    rollouts.ask(some_tokens(1))


def test_versions_of_calls_that_span_a_push(rollouts, models, tmp_path):
    """Each token's logprob is that of the version it is said to come from: none is sampled from old keys."""
    old = _policy(rollouts, models, tmp_path / "old")
    prompts = some_tokens(4)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.extend(rollouts.ask(prompts, Sampling(220, seed=3)))
    )
    rollouts.on_ranks(shake, 9)
    rollouts.on_ranks(export, tmp_path / "new")
    thread.start()
    time.sleep(0.4)
    version = rollouts.cluster.sync()
    thread.join()
    new = _load(tmp_path / "new")
    for prompt, generation in zip(prompts, answers):
        (before, first), (after, rest) = generation.versions.tolist()
        assert (before, after) == (version - 1, version) and first > 0 and first + rest == 220
        assert len(generation.routing) == 16 + 220 - 1
        wanted = np.concatenate(
            [
                _of(_logits(old, prompt, generation.ids), generation.ids)[:first],
                _of(_logits(new, prompt, generation.ids), generation.ids)[first:],
            ]
        )
        np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-3)


def test_s15_calls_may_end_before_new_weights_come(rollouts, models, tmp_path, monkeypatch):
    _policy(rollouts, models, tmp_path / "old")
    answers = []
    thread = threading.Thread(
        target=lambda: answers.extend(rollouts.ask(some_tokens(4), Sampling(220, seed=3)))
    )
    rollouts.on_ranks(shake, 9)
    monkeypatch.setattr(rollouts.cluster.config.asynchronous, "finish_calls", True)
    thread.start()
    time.sleep(0.4)
    version = rollouts.cluster.sync()
    thread.join()
    assert [g.versions.tolist() for g in answers] == [[[version - 1, 220]]] * 4


def test_a_call_that_is_given_up_is_dropped_by_its_engine(rollouts):
    prompts = some_tokens(32).numpy()
    begin = time.time()
    rollouts.ask(prompts, Sampling(230, seed=1))
    whole = time.time() - begin

    async def give_up():
        calls = (
            rollouts.fleet.generate(p, Sampling(230, seed=1), session=f"{i}")
            for i, p in enumerate(prompts)
        )
        await asyncio.wait_for(asyncio.gather(*calls), whole / 5)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    wait_for(lambda: _running(rollouts) == 0, whole / 2)
    assert all(slot.in_flight == 0 for slot in rollouts.fleet.slots)


def test_an_engine_killed_in_mid_rollout(rollouts, models, tmp_path):
    """kill -9: every call is answered once, as it would have been; the engine comes back with today's weights."""
    _policy(rollouts, models, tmp_path / "hf")
    rollouts.on_ranks(shake, 4)
    version = rollouts.cluster.sync()
    prompts = some_tokens(24, seed=4)
    sampling = Sampling(100, temperature=0.0)
    expected = rollouts.ask(prompts, sampling)
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(rollouts.ask(prompts, sampling)))
    thread.start()
    slot = rollouts.fleet.slots[0]
    wait_for(lambda: slot.in_flight == 12, 20)
    time.sleep(0.2)
    pid, vllm = slot.pid, descendants(slot.pid)
    os.kill(pid, signal.SIGKILL)
    thread.join(120)
    assert len(vllm) >= 2
    wait_for(lambda: not alive(vllm), 30)
    assert [g.ids.tolist() for g in answers] == [g.ids.tolist() for g in expected]
    assert all(g.versions.tolist() == [[version, 100]] for g in answers)
    wait_for(lambda: slot.serving, 200)
    assert slot.pid != pid and slot.restarts == 1
    again = rollouts.ask(prompts, sampling)
    assert [g.ids.tolist() for g in again] == [g.ids.tolist() for g in expected]
    assert all(g.versions.tolist() == [[version, 100]] for g in again)


def test_an_engine_whose_vllm_has_died_is_lost_at_a_push(rollouts, models, tmp_path):
    """Nobody has asked it anything since; the others get the weights, and it comes back with them."""
    _policy(rollouts, models, tmp_path / "hf")
    rollouts.on_ranks(shake, 5)
    slot = rollouts.fleet.slots[1]
    pid, (core,) = slot.pid, [line for line in alive(descendants(slot.pid)) if "EngineCore" in line]
    os.kill(int(core.split()[0]), signal.SIGKILL)
    time.sleep(0.1)
    version = rollouts.cluster.sync()
    wait_for(lambda: slot.serving and slot.pid != pid, 200)
    answers = rollouts.ask(some_tokens(4))
    assert all(g.versions.tolist() == [[version, 12]] for g in answers)


def _policy(rollouts, models, folder):
    """The policy as it is in the model's folder, in the engines, and as transformers has it."""
    rollouts.lay(models("qwen3_moe")[0], dict(expert=2))
    rollouts.cluster.sync()
    rollouts.on_ranks(export, folder)
    return _load(folder)


def _load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def _logits(model, prompt, ids) -> torch.Tensor:
    tokens = torch.cat([prompt, torch.tensor(ids, dtype=torch.int64)])[None]
    return model(tokens).logits[0, len(prompt) - 1 : -1]


def _of(logits: torch.Tensor, ids) -> np.ndarray:
    return (
        logits.log_softmax(-1)
        .gather(1, torch.tensor(ids, dtype=torch.int64)[:, None])[:, 0]
        .numpy()
    )


def _running(rollouts) -> int:
    return sum(
        ray.get(
            [
                h.__ray_call__.remote(lambda engine: len(engine.running))
                for h in rollouts.fleet.serving()
            ]
        )
    )


# ---------------------------------------------------------------- the fleet alone, with actors that misbehave


class Stub:
    """An actor with an engine's methods: `generate` does as the prompt says."""

    def __init__(self, index: int):
        self.index, self.calls, self.sick = index, 0, 0

    async def start(self) -> int:
        return os.getpid()

    async def check(self) -> None:
        if self.sick == 4:
            raise ValueError("a broken pipe")
        if self.sick == 5:
            await asyncio.sleep(1000)

    async def generate(self, prompt_ids, sampling, name, routing_start, routing_version):
        self.calls += 1
        if prompt_ids[0] == 1 and self.index == 0 or prompt_ids[0] == 2:
            await asyncio.sleep(1000)
        if prompt_ids[0] == 3:
            os._exit(1)
        self.sick = prompt_ids[0]
        return self.index, self.calls


def stubs(**settings) -> Fleet:
    spawn = ray.remote(Stub).options(num_cpus=0, max_concurrency=100).remote
    fleet = Fleet(spawn, EngineConfig(count=2, **settings))
    fleet.start()
    fleet.open()
    return fleet


def ask(fleet: Fleet, *prompts: int) -> list:
    async def all_of_them():
        calls = (
            fleet.generate(np.array([p]), GREEDY, session=f"{p} {i}") for i, p in enumerate(prompts)
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.fixture
def misbehaving(rollouts):
    fleets = []

    def make(**settings) -> Fleet:
        fleets.append(stubs(**settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def test_an_engine_that_hangs_is_replaced_and_its_calls_go_elsewhere(misbehaving):
    fleet = misbehaving(request_timeout_s=2)
    answers = ask(fleet, 1, 0, 0)  # the first goes to engine 0 and hangs there
    assert [index for index, _ in answers] == [1, 1, 0] or [index for index, _ in answers] == [
        1,
        0,
        1,
    ]
    wait_for(lambda: all(slot.serving for slot in fleet.slots), 30)
    assert [slot.restarts for slot in fleet.slots] == [1, 0]


@pytest.mark.parametrize(
    "sickness, why",
    [(4, "its health check failed: a broken pipe"), (5, "it did not answer a health check")],
)
def test_an_engine_that_is_not_well_is_replaced(misbehaving, sickness, why):
    fleet = misbehaving(health_every_s=0.2, health_timeout_s=1)
    ask(fleet, sickness)
    wait_for(lambda: fleet.slots[0].restarts == 1 and fleet.slots[0].serving, 30)
    assert (fleet.slots[0].lost_why, fleet.slots[1].restarts) == (why, 0)
    assert [calls for _, calls in ask(fleet, 0)] == [1]  # by the new one


def test_when_every_engine_is_gone_calls_end_with_an_error(misbehaving):
    fleet = misbehaving(restarts=1)
    answers = ask(fleet, 3, 3, 3)
    assert all(
        isinstance(a, EngineError) and "every engine is gone: 0: its process ended" in str(a)
        for a in answers
    )
