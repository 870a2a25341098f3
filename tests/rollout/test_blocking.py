"""Blocking calls of environments: bounded threads, no stall, nothing lost."""

import asyncio
import threading
import time

import pytest

from megastep.rollout.blocking import BlockingCalls


def test_at_most_limit_calls_run_at_a_time():
    calls = BlockingCalls(limit=3)
    running = 0
    most = 0
    lock = threading.Lock()

    def work(n):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return n

    async def run():
        return await asyncio.gather(*(calls.run(work, n) for n in range(12)))

    assert asyncio.run(run()) == list(range(12)) and most == 3
    assert calls.peak_waiting() >= 9 and calls.peak_waiting() == 0


def test_threads_are_reused():
    calls = BlockingCalls(limit=50)

    async def run():
        return {await calls.run(threading.get_ident) for _ in range(20)}

    assert len(asyncio.run(run())) == 1


def test_4096_calls_at_once_do_not_stall_the_event_loop():
    calls = BlockingCalls(limit=64)
    intervals = []

    async def beat():
        while True:
            start_s = time.perf_counter()
            await asyncio.sleep(0.01)
            intervals.append(time.perf_counter() - start_s)

    async def run():
        heart = asyncio.ensure_future(beat())
        await asyncio.gather(*(calls.run(time.sleep, 0.005) for _ in range(4096)))
        heart.cancel()

    asyncio.run(run())
    assert max(intervals) < 1.5  # on a busy machine; a thread per call took 4 s


def test_a_call_that_never_returns_costs_its_thread_only(capfd):
    calls = BlockingCalls(limit=2)
    forever = threading.Event()
    started = []

    def hang():
        started.append(True)
        forever.wait()

    async def run():
        for n in range(4):
            call = asyncio.ensure_future(calls.run(hang))
            while len(started) <= n:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.wait([call])
        return await asyncio.wait_for(calls.run(lambda: "done"), 5)

    assert asyncio.run(run()) == "done"
    assert capfd.readouterr().err.count("hang: still runs after its time limit") == 4
    forever.set()


def test_a_waiting_call_that_is_cancelled_never_runs():
    calls = BlockingCalls(limit=1)
    ran = []

    async def run():
        first = asyncio.ensure_future(calls.run(time.sleep, 0.2))
        await asyncio.sleep(0.02)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(calls.run(ran.append, 1), 0.05)
        await first
        await calls.run(ran.append, 2)

    asyncio.run(run())
    assert ran == [2]


@pytest.mark.parametrize(
    ("error", "raised"), [(ValueError("x"), ValueError), (StopIteration(), RuntimeError)]
)
def test_errors_reach_the_caller(error, raised):
    calls = BlockingCalls(limit=1)

    def fail():
        raise error

    async def run():
        for _ in range(2):  # the thread survives
            with pytest.raises(raised):
                await calls.run(fail)

    asyncio.run(run())
