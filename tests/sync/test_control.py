"""The control plane of a weight sync, with fake engines: who is dropped, and when."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from megastep.config import RANKS_TIMEOUT_S, EngineConfig, ParallelConfig
from megastep.distributed import parallel
from megastep.sync import engines as engines_module
from megastep.sync.engines import Engines


class Engine:
    """`load` returns at once, after 0.2 s, raises, or never ends."""

    def __init__(self, behaviour: str):
        self.behaviour = behaviour
        self.killed = False
        self.load = SimpleNamespace(remote=lambda: self)


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch):
    def wait(engines, timeout):
        ended = [engine for engine in engines if engine.behaviour != "hang"]
        if not ended or ended[0].behaviour == "slow":
            time.sleep(min(timeout, 0.2) if ended else timeout)
        return (ended[:1] if timeout > 0 else []), []

    def get(engine):
        if engine.behaviour == "fail":
            raise RayTaskError("load", "traceback", MemoryError("no memory for a layer"))
        return engine.behaviour

    def kill(engine):
        engine.killed = True

    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(wait=wait, get=get, kill=kill))


def load(*behaviours: str, timeout_s: float = 60.0) -> tuple[list, list[Engine], Engines]:
    engines = [Engine(behaviour) for behaviour in behaviours]
    control = Engines(engines, 7, EngineConfig(), timeout_s)
    return control.call("load"), engines, control


def test_an_engine_that_cannot_load_is_killed_and_dropped():
    results, engines, control = load("ok", "fail", "ok")
    assert results == ["ok", "ok"] and control.handles == [engines[0], engines[2]]
    assert [engine.killed for engine in engines] == [False, True, False]


def test_the_error_of_the_last_engine_is_that_of_the_sync():
    with pytest.raises(RayTaskError, match="traceback"):
        load("fail", "fail")


def test_engines_that_hang_share_one_deadline():
    """sync.timeout_s"""
    start_s = time.monotonic()
    results, engines, control = load("hang", "ok", "hang", "hang", timeout_s=0.3)
    assert 0.3 <= time.monotonic() - start_s < 0.8
    assert results == ["ok"] and control.handles == [engines[1]]
    assert [engine.killed for engine in engines] == [True, False, True, True]


def test_all_waits_of_a_sync_share_one_deadline():
    """The other ranks wait in one collective call for several calls of engines."""
    start_s = time.monotonic()
    settings = EngineConfig(health_timeout_s=0.2)
    control = Engines([Engine("slow"), Engine("slow")], 7, settings, timeout_s=1.0)
    for _ in range(8):
        control.call("load")
    assert 1.0 <= time.monotonic() - start_s < 1.5
    assert control.handles == []


def test_an_engine_that_hangs_does_not_use_the_time_of_the_others():
    """After late engines the others get the time of a health check, once."""
    settings = EngineConfig(health_timeout_s=0.5)
    slow = Engine("slow")
    control = Engines([Engine("hang"), slow], 7, settings, timeout_s=0.3)
    assert control.call("load") == ["slow"]
    assert control.call("load") == ["slow"] and control.handles == [slow]
    start_s = time.monotonic()
    for _ in range(4):
        control.call("load")
    assert time.monotonic() - start_s < 0.5 and control.handles == []


def test_time_between_waits_is_not_counted():
    """Engines are not late because ranks gather or copy."""
    control = Engines([Engine("slow")], 7, EngineConfig(), timeout_s=0.5)
    control.call("load")
    time.sleep(0.5)
    assert control.call("load") == ["slow"]


def test_after_an_abort_engines_have_the_time_of_a_health_check():
    group = FakeGroup()
    settings = EngineConfig(health_timeout_s=0.4)
    control = Engines([Engine("hang"), Engine("hang")], 7, settings, timeout_s=0.3)
    control.group = group
    start_s = time.monotonic()
    assert control.call("load") == [] and control.handles == []
    assert group.is_aborted and 0.7 <= time.monotonic() - start_s < 1.0


def test_ranks_wait_as_long_as_the_config_checks_assume(monkeypatch):
    """RANKS_TIMEOUT_S is the timeout of their collective calls."""
    found = {}
    monkeypatch.setattr(parallel, "_store", lambda *arguments: None)
    monkeypatch.setattr(parallel, "_create_groups", lambda degrees: None)
    monkeypatch.setattr(
        parallel.dist, "init_process_group", lambda *_, **named: found.update(named)
    )
    parallel.start(ParallelConfig(), 0, 1, "127.0.0.1:1")
    assert found["timeout"] == timedelta(seconds=RANKS_TIMEOUT_S)


class FakeGroup:
    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True
