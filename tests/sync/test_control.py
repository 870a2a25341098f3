"""The control plane of a weight sync, with fake engines: who is dropped, and when."""

import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from megastep.config import EngineConfig
from megastep.sync import sender
from megastep.sync.sender import Engines


class Engine:
    """`load` returns at once, raises, or never ends."""

    def __init__(self, behaviour: str):
        self.behaviour = behaviour
        self.killed = False
        self.load = SimpleNamespace(remote=lambda: self)


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch):
    def wait(engines, timeout):
        ended = [engine for engine in engines if engine.behaviour != "hang"]
        if not ended:
            time.sleep(timeout)
        return ended[:1], []

    def get(engine):
        if engine.behaviour == "fail":
            raise RayTaskError("load", "traceback", MemoryError("no memory for a layer"))
        return engine.behaviour

    def kill(engine):
        engine.killed = True

    monkeypatch.setattr(sender, "ray", SimpleNamespace(wait=wait, get=get, kill=kill))


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
