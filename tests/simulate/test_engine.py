"""X8: the engine model against closed forms."""

import asyncio

import pytest

from megastep.rollout.generation import Session
from megastep.simulate.clock import VirtualLoop
from megastep.simulate.engine import SimulatedEngine, SimulatedSampling, zeros
from megastep.simulate.roofline import Iteration

BASE = 0.01
PER_SEQUENCE = 0.001
PER_KV_TOKEN = 1e-6
PER_PREFILL_TOKEN = 1e-4
CALL = 0.5
FIRST = Session("a", 0)


class ConstantTimes:
    call_s = CALL

    def iteration(self, sequences):
        return Iteration(BASE, PER_SEQUENCE * sequences, 0.0, 0.0, PER_KV_TOKEN)

    def prefill(self, new_tokens, cached_tokens):
        return PER_PREFILL_TOKEN * new_tokens


def engine(max_sequences: int = 8, kv_tokens: int = 10**6) -> SimulatedEngine:
    return SimulatedEngine(ConstantTimes(), max_sequences, kv_tokens)


def ask(
    simulated: SimulatedEngine,
    prompt: int,
    response: int,
    session: Session = FIRST,
    shared: int = 0,
    first_prompt: int = 0,
) -> asyncio.Future:
    sampling = SimulatedSampling(
        max_tokens=response,
        response_tokens=response,
        shared_tokens=shared,
        session=session,
        first_prompt_tokens=first_prompt,
    )
    return simulated.generate.remote(zeros(prompt), sampling, "name", 0, None)


def run(scene) -> float:
    """Seconds that the scene, a coroutine function, takes."""
    loop = VirtualLoop()
    try:
        loop.run_until_complete(loop.while_driver_waits(scene()))
        return loop.time()
    finally:
        loop.close()


def decode_s(sequences: int, tokens: int, kv_tokens: int) -> float:
    """Of `tokens` iterations, the KV cache growing by one token per sequence."""
    constant = BASE + PER_SEQUENCE * sequences + PER_KV_TOKEN * kv_tokens
    return tokens * constant + PER_KV_TOKEN * sequences * tokens**2 / 2


def test_one_sequence():
    async def scene():
        generation = await ask(engine(), prompt=1000, response=200)
        assert len(generation.ids) == 200

    assert run(scene) == pytest.approx(CALL + 0.1 + decode_s(1, 200, 1000))


def test_a_full_batch_shares_its_iterations():
    async def scene():
        simulated = engine()
        await asyncio.gather(*(ask(simulated, 100, 50, Session(f"{i}", 0)) for i in range(8)))

    prefill_s = 8 * 100 * PER_PREFILL_TOKEN
    assert run(scene) == pytest.approx(CALL + prefill_s + decode_s(8, 50, 800))


def test_a_call_that_ends_leaves_the_others_faster():
    async def scene():
        simulated = engine()
        await asyncio.gather(
            ask(simulated, 100, 50, Session("a", 0)), ask(simulated, 100, 80, Session("b", 0))
        )

    expected = CALL + 200 * PER_PREFILL_TOKEN + decode_s(2, 50, 200) + decode_s(1, 30, 150)
    assert run(scene) == pytest.approx(expected)


def test_calls_beyond_max_sequences_wait():
    async def scene():
        simulated = engine(max_sequences=1)
        await asyncio.gather(*(ask(simulated, 100, 50, Session(f"{i}", 0)) for i in range(3)))

    assert run(scene) == pytest.approx(CALL + 3 * (0.01 + decode_s(1, 50, 100)))


def test_calls_wait_for_room_in_the_kv_cache():
    async def scene():
        simulated = engine(kv_tokens=200)
        await asyncio.gather(*(ask(simulated, 100, 50, Session(f"{i}", 0)) for i in range(2)))

    assert run(scene) == pytest.approx(CALL + 2 * (0.01 + decode_s(1, 50, 100)))


def test_a_call_larger_than_the_kv_cache_runs_alone():
    async def scene():
        await ask(engine(kv_tokens=10), 100, 50)

    assert run(scene) == pytest.approx(CALL + 0.01 + decode_s(1, 50, 100))


def test_a_later_turn_finds_its_prefix_in_the_cache():
    async def scene():
        simulated = engine()
        await ask(simulated, 1000, 50)
        await ask(simulated, 1250, 50, shared=1050)
        assert simulated.prefilled_tokens == 1000 + 200
        assert simulated.cached_tokens == 1050

    run(scene)


def test_samples_of_a_prompt_share_its_prefill():
    async def scene():
        simulated = engine()
        calls = [ask(simulated, 1000, 50, Session("a", i), 0, 1000) for i in range(4)]
        await asyncio.gather(*calls)
        assert simulated.prefilled_tokens == 1000 + 3  # the last token is always computed

    run(scene)


def test_a_full_kv_cache_evicts_prefixes():
    async def scene():
        simulated = engine(kv_tokens=1500)
        await ask(simulated, 1000, 50)
        await ask(simulated, 1000, 50, Session("b", 0))
        await ask(simulated, 1250, 50, shared=1050)
        assert simulated.cached_tokens == 0

    run(scene)


def test_a_weight_sync_interrupts_calls_and_drops_the_cache():
    """The call continues with the new weights, its prompt and tokens prefilled again."""

    async def scene():
        simulated = engine()
        call = ask(simulated, 1000, 200)
        await asyncio.sleep(CALL + 0.1 + decode_s(1, 50, 1000))
        await simulated.pause(finish_calls=False)
        await asyncio.sleep(30.0)
        simulated.update_weights(7)
        simulated.resume()
        generation = await call
        assert generation.versions.tolist() == [[0, 50], [7, 150]]
        assert simulated.prefilled_tokens == 1000 + 1050

    before = CALL + 0.1 + decode_s(1, 50, 1000)
    after = 1050 * PER_PREFILL_TOKEN + decode_s(1, 150, 1050)
    assert run(scene) == pytest.approx(before + 30 + after)


def test_a_pause_that_lets_calls_finish_holds_new_ones():
    async def scene():
        simulated = engine()
        first = ask(simulated, 100, 50)
        await asyncio.sleep(CALL + 0.1)
        second = ask(simulated, 100, 50, Session("b", 0))
        await simulated.pause(finish_calls=True)
        assert first.done() and not second.done()
        await asyncio.sleep(30.0)
        simulated.update_weights(7)
        simulated.resume()
        assert (await second).versions.tolist() == [[7, 50]]

    finished = CALL + 0.01 + decode_s(1, 50, 100)
    assert run(scene) == pytest.approx(finished + 30 + 0.01 + decode_s(1, 50, 100))


def test_an_aborted_call_frees_its_place():
    async def scene():
        simulated = engine(max_sequences=1, kv_tokens=160)
        first = ask(simulated, 100, 50)
        second = ask(simulated, 100, 50, Session("b", 0))
        await asyncio.sleep(CALL + 0.1)
        first.cancel()
        await second

    assert run(scene) == pytest.approx(CALL + 0.1 + 0.01 + decode_s(1, 50, 100))


def test_busy_seconds_add_up():
    async def scene():
        simulated = engine()
        await asyncio.sleep(5.0)
        await ask(simulated, 1000, 200)
        parts = {
            "prefill": 0.1,
            "weights": 200 * BASE,
            "compute": 200 * PER_SEQUENCE,
            "links": 0.0,
            "fixed": 0.0,
            "KV cache": PER_KV_TOKEN * (200 * 1000 + 200**2 / 2),
        }
        assert simulated.seconds == pytest.approx(parts)

    run(scene)
