"""D3, S10: a fleet of engines: session affinity, load balancing, restarts, one answer per call."""

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
from megastep.errors import EngineError, PolicyLost
from megastep.rollout import fleet as fleet_module
from megastep.rollout.engine import Progress, run_lengths
from megastep.rollout.fleet import Fleet
from megastep.rollout.generation import Sampling, Session
from megastep.rollout.router import Lost
from tests.engines import GREEDY, export, shake
from tests.models import some_tokens
from tests.processes import alive, descendants, wait_for


def test_run_lengths():
    assert run_lengths([[3, 0], [4, 5]], 8).tolist() == [[3, 5], [4, 3]]
    # Started before the weight sync, sampled after it.
    assert run_lengths([[3, 0], [4, 0]], 8).tolist() == [[4, 8]]
    assert run_lengths([[3, 0]], 0).shape == (0, 2)


def test_an_engine_that_ray_kills_for_memory_is_lost(monkeypatch):
    """Ray's OutOfMemoryError is no RayActorError."""

    class Handle:
        def __getattr__(self, method):
            return self

        async def remote(self, *arguments):
            raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory")

    monkeypatch.setattr("ray.kill", lambda handle: None)
    fleet = Fleet(lambda index: Handle(), EngineConfig(health_every_s=0.01, restarts=0))
    try:
        fleet.open()
        wait_for(lambda: fleet.slots[0].gone, 10)
        with pytest.raises(
            EngineError, match="every engine is gone: 0: its process ended: Ray killed it because"
        ):
            asyncio.run(fleet.generate(np.zeros(1), GREEDY, session=Session("any", 0)))
    finally:
        fleet.close()


def test_start_timeout_s(monkeypatch):

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
    router = rollouts.fleet.router
    placed = []
    for turn in range(3):
        order = sessions[turn:] + sessions[:turn]  # without affinity the first goes to engine 0
        rollouts.ask(prompts, sessions=order)
        placed.append([router._sessions[Session(s, 0)].slot for s in sessions])
    assert placed[0] == placed[1] == placed[2] and sorted(placed[0]) == [0] * 4 + [1] * 4


def test_s10_routing_starts_at_routing_start(rollouts):
    """P + R - 1 tokens have routing; a second turn records only what the first has not."""
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
    """With the weights of the earlier call only new tokens are recorded; with others all tokens,
    also by a call that arrives while the engines are paused for the sync."""
    _policy(rollouts, models, tmp_path / "hf")
    (first,) = rollouts.ask(some_tokens(1), sessions=["synced"])
    prompt = np.concatenate([some_tokens(1)[0].numpy(), first.ids, [1, 2, 3]])
    version = int(first.versions[0, 0])
    known = len(first.routing)
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
    (paused,) = answers
    (after,) = rollouts.ask([prompt], **earlier)
    for made in (paused, after):
        assert made.versions.tolist() == [[synced, 12]] and synced != version
        assert made.routing_start == 0 and len(made.routing) == len(prompt) + 12 - 1
    assert np.array_equal(paused.routing, after.routing)


def test_logprobs_are_those_of_the_sampling_distribution(rollouts, models, tmp_path):
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
            expected = _logprobs(logits, generation.ids)
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)


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


def test_an_invalid_call_is_rejected_in_one_line(rollouts):
    with pytest.raises(EngineError, match="an engine rejected a call: .*256") as error:
        rollouts.ask(some_tokens(1, length=300))
    assert "\n" not in str(error.value)
    rollouts.ask(some_tokens(1))


def test_versions_of_calls_that_span_a_weight_sync(rollouts, models, tmp_path):
    """Each token's logprob is that of its recorded version: none is sampled from stale keys."""
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
        by_old = _logprobs(_logits(old, prompt, generation.ids), generation.ids)
        by_new = _logprobs(_logits(new, prompt, generation.ids), generation.ids)
        expected = np.concatenate([by_old[:first], by_new[first:]])
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)


def test_s15_finish_calls_lets_calls_end_before_the_sync(rollouts, models, tmp_path, monkeypatch):
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


def test_a_cancelled_call_is_aborted_by_its_engine(rollouts):
    prompts = some_tokens(32).numpy()
    begin = time.time()
    rollouts.ask(prompts, Sampling(230, seed=1))
    whole_s = time.time() - begin

    async def cancel():
        calls = (
            rollouts.fleet.generate(p, Sampling(230, seed=1), session=Session(f"{i}", 0))
            for i, p in enumerate(prompts)
        )
        await asyncio.wait_for(asyncio.gather(*calls), whole_s / 5)

    with pytest.raises(TimeoutError):
        asyncio.run(cancel())
    wait_for(lambda: _running(rollouts) == 0, whole_s / 2)
    assert not any(rollouts.fleet.router.in_flight.values())


def test_an_engine_killed_during_a_rollout(rollouts, models, tmp_path):
    """kill -9: every call gets its one, expected answer; the engine restarts with the current
    weights."""
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
    wait_for(lambda: rollouts.fleet.router.in_flight[slot.id] == 12, 20)
    time.sleep(0.2)
    pid = slot.pid
    vllm = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    thread.join(120)
    assert len(vllm) == 1  # its engine core
    wait_for(lambda: not alive(vllm), 30)
    assert [g.ids.tolist() for g in answers] == [g.ids.tolist() for g in expected]
    assert all(g.versions.tolist() == [[version, 100]] for g in answers)
    wait_for(lambda: slot.stale, 200)
    version = rollouts.cluster.sync()
    assert slot.serving and slot.pid != pid and slot.restarts == 1
    again = rollouts.ask(prompts, sampling)
    assert [g.ids.tolist() for g in again] == [g.ids.tolist() for g in expected]
    assert all(g.versions.tolist() == [[version, 100]] for g in again)


def test_an_engine_whose_vllm_died_is_lost_at_a_weight_sync(rollouts, models, tmp_path):
    """It had no call since; the other engines get the weights, and it restarts with them."""
    _policy(rollouts, models, tmp_path / "hf")
    rollouts.on_ranks(shake, 5)
    slot = rollouts.fleet.slots[1]
    pid = slot.pid
    ((core, _),) = descendants(pid)
    os.kill(core, signal.SIGKILL)
    time.sleep(0.1)
    rollouts.cluster.sync()
    wait_for(lambda: slot.stale and slot.pid != pid, 200)
    version = rollouts.cluster.sync()
    assert slot.serving
    answers = rollouts.ask(some_tokens(4))
    assert all(g.versions.tolist() == [[version, 12]] for g in answers)


def _policy(rollouts, models, folder):
    """Load the model into the policy and the engines; returns it as a transformers model."""
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


def _logprobs(logits: torch.Tensor, ids) -> np.ndarray:
    index = torch.tensor(ids, dtype=torch.int64)[:, None]  # [R, 1]
    return logits.log_softmax(-1).gather(1, index)[:, 0].numpy()


def _running(rollouts) -> int:
    """Calls in flight, as the engines count them."""
    count = [
        handle.__ray_call__.remote(lambda engine: len(engine.running))
        for handle in rollouts.fleet.serving()
    ]
    return sum(ray.get(count))


# ---------------------------------------------------------------- failing actors


class Stub:
    """An actor with an engine's methods; the prompt selects how it fails from then on."""

    def __init__(self, index: int):
        self.index = index
        self.calls = 0
        self.running = 0
        self.sick = 0

    async def start(self) -> int:
        return os.getpid()

    async def check(self) -> Progress:
        if self.sick == 4:
            raise ValueError("a broken pipe")
        if self.sick == 5:
            await asyncio.sleep(1000)
        return Progress(running=self.running, tokens=0)

    async def generate(self, prompt_ids, sampling, name, routing_start, routing_version):
        self.calls += 1
        self.running += 1
        try:
            if prompt_ids[0] == 1 and self.index == 0 or prompt_ids[0] == 2:
                await asyncio.sleep(1000)
        finally:
            self.running -= 1
        if prompt_ids[0] == 3:
            os._exit(1)
        self.sick = prompt_ids[0]
        return self.index, self.calls

    async def pause(self, finish_calls: bool) -> None:
        if self.sick == 6 and self.index == 0:
            raise ValueError("an illegal memory access")
        if self.sick == 7 and self.index == 0:
            await asyncio.sleep(1000)


def stubs(refresh=None, **settings) -> Fleet:
    spawn = ray.remote(Stub).options(num_cpus=0, max_concurrency=100).remote
    fleet = Fleet(spawn, EngineConfig(num_engines=2, **settings), refresh)
    fleet.start()
    fleet.open()
    return fleet


def ask(fleet: Fleet, *prompts: int) -> list:
    async def all_of_them():
        calls = (
            fleet.generate(np.array([p]), GREEDY, session=Session(f"{p} {i}", 0))
            for i, p in enumerate(prompts)
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.fixture
def failing(rollouts):
    fleets = []

    def make(**settings) -> Fleet:
        fleets.append(stubs(**settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def test_a_stuck_engine_is_restarted_and_its_calls_are_rerouted(failing):
    """engine.progress_timeout_s"""
    fleet = failing(progress_timeout_s=1, health_every_s=0.2)
    answers = ask(fleet, 1, 0, 0)  # the first goes to engine 0 and hangs there
    assert [index for index, _ in answers] in ([1, 1, 0], [1, 0, 1])
    wait_for(lambda: all(slot.serving for slot in fleet.slots), 30)
    assert [slot.restarts for slot in fleet.slots] == [1, 0]
    assert fleet.slots[0].lost_reason == "no progress in engine.progress_timeout_s = 1"
    assert fleet.metrics() == {"engine/serving": 2, "engine/restarts": 1, "engine/queued": 0}


def test_one_long_call_disturbs_no_other(failing):
    """engine.request_timeout_s"""
    fleet = failing(request_timeout_s=2)
    answers = ask(fleet, 2, *[0] * 200)
    assert "no answer in engine.request_timeout_s = 2" in str(answers[0])
    assert all(isinstance(answer, tuple) for answer in answers[1:])
    assert [slot.restarts for slot in fleet.slots] == [0, 0]


@pytest.mark.parametrize(
    "prompt, reason",
    [(4, "its health check failed: a broken pipe"), (5, "it did not answer a health check")],
)
def test_an_unhealthy_engine_is_restarted(failing, prompt, reason):
    fleet = failing(health_every_s=0.2, health_timeout_s=1)
    ask(fleet, prompt)
    wait_for(lambda: fleet.slots[0].restarts == 1 and fleet.slots[0].serving, 30)
    assert (fleet.slots[0].lost_reason, fleet.slots[1].restarts) == (reason, 0)
    assert [calls for _, calls in ask(fleet, 0)] == [1]  # of the new actor


@pytest.mark.parametrize(
    "prompt, reason",
    [(6, "pause failed: an illegal memory access"), (7, "no answer to pause in 1 s")],
)
def test_an_engine_that_fails_to_pause_is_lost_and_the_run_continues(failing, prompt, reason):
    fleet = failing(health_timeout_s=1, health_every_s=60)
    ask(fleet, prompt, prompt)
    fleet.pause()
    assert fleet.slots[0].lost_reason == reason and fleet.slots[1].serving
    wait_for(lambda: fleet.slots[0].serving, 30)
    assert [slot.restarts for slot in fleet.slots] == [1, 0]


def test_calls_raise_when_every_engine_is_gone(failing):
    fleet = failing(restarts=1)
    answers = ask(fleet, 3, 3, 3)
    assert all(
        isinstance(a, EngineError) and "every engine is gone: 0: its process ended" in str(a)
        for a in answers
    )


def test_restarts_are_counted_within_the_window(failing, monkeypatch):
    """A long run has engine.restarts again and again; a crash loop ends."""
    monkeypatch.setattr(fleet_module, "RESTART_WINDOW_S", 3.0)
    fleet = failing(restarts=1)
    slot = fleet.slots[0]
    times_s = []
    for restarts in (1, 2):
        os.kill(slot.pid, signal.SIGKILL)
        fleet.report(Lost(slot.id, "killed"))
        wait_for(lambda: slot.serving and slot.restarts == restarts, 30)  # noqa: B023
        times_s.append(slot.restarted_s[-1])
    assert times_s[1] - times_s[0] >= 3.0 and not slot.gone


def test_a_restarted_engine_waits_for_the_next_weight_sync(failing):
    """Training does not stop for it, and it never serves without the policy's weights."""
    refreshed = []
    fleet = failing(refresh=lambda handle, serve: refreshed.append(handle) or serve())
    slot, other = fleet.slots
    fleet.report(Lost(slot.id, "killed"))
    wait_for(lambda: slot.stale, 30)
    assert fleet.serving() == [other.handle] and slot.handle in fleet.ready()
    assert [index for index, _ in ask(fleet, 0, 0)] == [1, 1] and not refreshed
    fleet.serve(fleet.ready())
    assert slot.serving and not slot.stale
    assert sorted(index for index, _ in ask(fleet, 8, 8)) == [0, 1]  # other sessions


def test_a_restarted_engine_gets_its_own_weight_sync_if_no_other_serves(failing):
    """The next weight sync may wait for the calls that wait for an engine."""
    refreshed = []
    fleet = failing(refresh=lambda handle, serve: refreshed.append(handle) or serve())
    slot, other = fleet.slots
    fleet.report(Lost(slot.id, "killed"))
    wait_for(lambda: slot.stale, 30)
    fleet.report(Lost(other.id, "killed"))
    wait_for(lambda: slot.serving, 30)
    assert refreshed == [slot.handle]
    wait_for(lambda: other.stale, 30)


def test_x18_an_engine_lost_with_the_policy_waits_for_the_new_one(failing):
    """Without losing a restart."""
    fleet = failing(restarts=1, health_every_s=0.1)
    slot = fleet.slots[0]
    spawn = fleet._spawn
    asked = []

    def lost(index: int):
        asked.append(index)
        raise PolicyLost("policy rank 0 died")

    fleet._spawn = lost
    fleet.report(Lost(slot.id, "killed"))
    wait_for(lambda: len(asked) > 3, 30)
    assert slot.restarts == 0 and not slot.gone
    fleet._spawn = spawn
    wait_for(lambda: slot.serving, 30)
    assert slot.restarts == 1


def test_x18_an_engine_whose_weight_sync_lost_the_policy_stays_for_the_next(failing):
    calls = []

    def refresh(handle, serve) -> None:
        calls.append(handle)
        raise PolicyLost("policy rank 0 died")

    fleet = failing(refresh=refresh)
    for slot in fleet.slots:
        fleet.report(Lost(slot.id, "killed"))
    wait_for(lambda: all(slot.stale for slot in fleet.slots) and calls, 30)
    fleet.serve(fleet.ready())
    assert all(slot.serving and slot.restarts == 1 for slot in fleet.slots)


# ---------------------------------------------------------------- slow and hung vLLM


def test_x18_one_over_long_call_among_200_disturbs_no_other(rollouts, monkeypatch):
    """engine.request_timeout_s, on real vLLM: the call is aborted, the others get their answers."""
    short = [Sampling(1, temperature=0.0)] * 200
    prompts = some_tokens(201, seed=6).numpy()

    def ask_all() -> list[tuple]:
        """(answer, seconds) of each call; the first one is the long one."""

        async def one(index: int, sampling: Sampling) -> tuple:
            begun = time.monotonic()
            session = Session(f"long {index}", 0)
            try:
                answer = await rollouts.fleet.generate(prompts[index], sampling, session=session)
            except EngineError as error:
                answer = error
            return answer, time.monotonic() - begun

        async def all_of_them() -> list[tuple]:
            calls = [Sampling(230, temperature=0.0), *short]
            return await asyncio.gather(*(one(i, s) for i, s in enumerate(calls)))

        return asyncio.run(all_of_them())

    (long, long_s), *others = ask_all()
    limit_s = 0.7 * long_s
    assert len(long.ids) == 230 and max(seconds for _, seconds in others) < limit_s / 1.5
    starts = [slot.starts for slot in rollouts.fleet.slots]
    monkeypatch.setattr(rollouts.fleet.router, "_timeout_s", limit_s)
    (error, _), *again = ask_all()
    assert "no answer in engine.request_timeout_s" in str(error)
    assert [a.ids.tolist() for a, _ in again] == [a.ids.tolist() for a, _ in others]
    assert [slot.starts for slot in rollouts.fleet.slots] == starts
    wait_for(lambda: _running(rollouts) == 0, 10)


def hang_in_next_sync(engine) -> None:
    """Stop vLLM's process, with SIGSTOP, when the first weights arrive."""
    update = engine.llm.update_weights

    async def hang(request) -> None:
        ((core, _),) = descendants(os.getpid())
        os.kill(core, signal.SIGSTOP)
        await update(request)

    engine.llm.update_weights = hang


def test_x18_an_engine_that_hangs_in_a_weight_sync_does_not_end_the_run(rollouts, models, tmp_path):
    """sync.timeout_s, on real vLLM: the others serve the new weights, and it restarts."""
    _policy(rollouts, models, tmp_path / "hf")
    rollouts.on_ranks(shake, 6)
    rollouts.on_ranks(lambda rank: setattr(rank.sender.config.sync, "timeout_s", 4))
    slot, other = rollouts.fleet.slots
    pid = slot.pid
    vllm = descendants(pid)
    ray.get(slot.handle.__ray_call__.remote(hang_in_next_sync))
    begun = time.monotonic()
    version = rollouts.cluster.sync()
    assert 4 <= time.monotonic() - begun < 30
    assert not slot.serving and other.serving
    answers = rollouts.ask(some_tokens(4))
    assert all(g.versions.tolist() == [[version, 12]] for g in answers)
    wait_for(lambda: not alive(vllm), 30)
    wait_for(lambda: slot.stale and slot.pid != pid, 200)
    rollouts.cluster.sync()
    assert slot.serving
    expected = rollouts.ask(some_tokens(4), sessions=list("abcd"))
    assert [g.ids.tolist() for g in answers] == [g.ids.tolist() for g in expected]
