"""The engine of each call, with fake engines: affinity, load, retries, time limits."""

import asyncio

import numpy as np
import pytest
from ray.exceptions import RayActorError

from megastep.config import EngineConfig
from megastep.errors import EngineError
from megastep.rollout import router as router_module
from megastep.rollout.generation import Sampling, Session
from megastep.rollout.router import EngineId, Engines, Router

A, B = EngineId(0, 1), EngineId(1, 1)
PROMPT = np.arange(3, dtype=np.int32)


class FakeEngine:
    """`generate` waits until `answer` or `die` is called."""

    def __init__(self):
        self.generate = self
        self.calls = []
        self.names = []

    def remote(self, prompt_ids, sampling, name, routing_start, routing_version):
        future = asyncio.get_running_loop().create_future()
        self.calls.append(future)
        self.names.append(name)
        return future

    def answer(self, value="answer"):
        for call in self.calls:
            if not call.done():
                call.set_result(value)

    def die(self):
        for call in self.calls:
            if not call.done():
                call.set_exception(RayActorError())


class Fixture:
    def __init__(self, first=0, **settings):
        self.reports = []
        self.engines = {A: FakeEngine(), B: FakeEngine()}
        self.router = Router(EngineConfig(**settings), self.reports.append, first)
        self.router.update(Engines(dict(self.engines)))
        self.tasks = []

    async def ask(self, group: str, sample: int = 0) -> asyncio.Task:
        call = self.router.generate(PROMPT, Sampling(4), session=Session(group, sample))
        task = asyncio.ensure_future(call)
        self.tasks.append(task)
        await settle()
        return task

    def load(self) -> list[int]:
        return [len(engine.calls) for engine in self.engines.values()]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def cancelled(monkeypatch):
    references = []
    monkeypatch.setattr(router_module.ray, "cancel", references.append)
    return references


def test_samples_of_a_prompt_go_to_one_engine():
    async def run():
        fixture = Fixture()
        for group in ("p0", "p1", "p2", "p3"):
            for sample in range(4):
                await fixture.ask(group, sample)
        placed = fixture.router._groups
        assert [placed[group] for group in ("p0", "p1", "p2", "p3")] == [A, B, A, B]
        assert fixture.load() == [8, 8]

    asyncio.run(run())


def test_a_group_leaves_an_engine_without_room():
    async def run():
        fixture = Fixture()
        for sample in range(32):
            await fixture.ask("p0", sample)
        assert max(fixture.load()) - min(fixture.load()) <= 12 and min(fixture.load()) >= 8

    asyncio.run(run())


def test_calls_of_a_session_go_to_its_engine_whatever_the_load():
    async def run():
        fixture = Fixture()
        await fixture.ask("p0")
        for _ in range(20):
            await fixture.ask("p0", 0)
        assert fixture.load() == [21, 0]

    asyncio.run(run())


@pytest.mark.parametrize(("first", "load"), [(0, [1, 0]), (1, [0, 1]), (3, [0, 1])])
def test_routers_start_with_different_engines(first, load):
    async def run():
        fixture = Fixture(first)
        await fixture.ask("p0")
        assert fixture.load() == load

    asyncio.run(run())


def test_a_call_is_retried_only_after_its_engine_was_killed():
    async def run():
        fixture = Fixture()
        task = await fixture.ask("p0")
        fixture.engines[A].die()
        await settle()
        assert [report.engine for report in fixture.reports] == [A]
        assert fixture.load() == [1, 0]  # the fleet has not killed it yet
        fixture.router.update(Engines({B: fixture.engines[B]}))
        await settle()
        assert fixture.load() == [1, 1] and not task.done()
        fixture.engines[B].answer()
        assert await task == "answer"
        names = fixture.engines[A].names + fixture.engines[B].names
        assert len(set(names)) == 2  # vLLM needs unique request ids

    asyncio.run(run())


def test_a_restarted_engine_is_another_one():
    """Its cache is empty: the session may move."""

    async def run():
        fixture = Fixture()
        task = await fixture.ask("p0")
        fixture.engines[A].answer()
        await task
        restarted = {EngineId(0, 2): FakeEngine(), B: fixture.engines[B]}
        fixture.router.update(Engines(restarted))
        await fixture.ask("p0")
        assert len(restarted[EngineId(0, 2)].calls) == 1 and fixture.load() == [1, 0]

    asyncio.run(run())


def test_a_call_over_its_time_limit_is_aborted_and_its_engine_stays(cancelled):
    async def run():
        fixture = Fixture(request_timeout_s=1)
        slow = await fixture.ask("p0")
        with pytest.raises(
            EngineError, match="no answer in engine.request_timeout_s = 1; the call"
        ):
            await slow
        assert cancelled == fixture.engines[A].calls and fixture.reports == []
        other = await fixture.ask("p0", 1)
        fixture.engines[A].answer()
        assert await other == "answer" and fixture.router.in_flight[A] == 0

    asyncio.run(run())


def test_a_cancelled_call_is_aborted(cancelled):
    async def run():
        fixture = Fixture()
        task = await fixture.ask("p0")
        task.cancel()
        await asyncio.wait([task])
        assert cancelled == fixture.engines[A].calls and not any(fixture.router.in_flight.values())

    asyncio.run(run())


def test_calls_wait_for_an_engine_and_raise_when_all_are_gone():
    async def run():
        fixture = Fixture()
        fixture.router.update(Engines({}))
        waiting = await fixture.ask("p0")
        assert not waiting.done()
        fixture.router.update(Engines({}, gone="0: its process ended"))
        with pytest.raises(EngineError, match="every engine is gone: 0: its process ended"):
            await waiting

    asyncio.run(run())


def test_sessions_are_forgotten_in_order(monkeypatch):
    monkeypatch.setattr(router_module, "_REMEMBERED", 3)

    async def run():
        fixture = Fixture()
        for n in range(5):
            await fixture.ask(f"p{n}")
        assert [session.group for session in fixture.router._sessions] == ["p2", "p3", "p4"]

    asyncio.run(run())
