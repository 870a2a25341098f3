"""X18: a lost policy, with a fake Ray. tests/launch/test_two_nodes.py has a real one."""

from types import SimpleNamespace

import pytest
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from megastep.errors import PolicyLost, TrainingError
from megastep.policy import actor
from megastep.policy.actor import Policy, RankPlace


class Rank:
    """`answers[method]`: what its calls return, or raise; a call is answered when it is read."""

    def __init__(self, number: int):
        self._actor_id = SimpleNamespace(hex=lambda: f"id {number}")
        self.answers: dict[str, object] = {"where": ("node", [])}
        self.asked: list[str] = []

    def __getattr__(self, method: str):
        def remote(*_):
            self.asked.append(method)
            return lambda: self.answers.get(method)

        return SimpleNamespace(remote=remote)


def get(calls, timeout=None):
    if not isinstance(calls, list):
        return calls()
    answers = [call() for call in calls]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch):
    def wait(calls, num_returns=1, timeout=None):
        return calls[:num_returns], calls[num_returns:]

    fake = SimpleNamespace(get=get, put=lambda value: value, wait=wait)
    monkeypatch.setattr(actor, "ray", fake)
    monkeypatch.setattr(actor, "_CHECK_EVERY_S", 0.0)


@pytest.fixture
def policy() -> Policy:
    made = Policy([Rank(0), Rank(1)])
    made.places = [RankPlace(0, 0), RankPlace(1, 0)]
    return made


def died(number: int) -> RayActorError:
    return RayActorError(actor_id=f"id {number}", error_msg="The actor died\nfor a reason")


def test_a_rank_that_died_is_named(policy):
    policy.ranks[1].answers["call"] = died(1)
    with pytest.raises(PolicyLost, match="^policy rank 1 died$"):
        policy.offload()
    with pytest.raises(PolicyLost, match="^policy rank 1 died$"):
        policy.check()


def test_a_rank_that_died_without_a_call_is_noticed_by_check(policy):
    policy.check()
    policy.ranks[0].answers["where"] = died(0)
    with pytest.raises(PolicyLost, match="^policy rank 0 died$"):
        policy.check()


def test_a_rank_that_ray_killed_for_memory_is_lost(policy):
    policy.ranks[0].answers["call"] = OutOfMemoryError("Task was killed due to 95%\nof memory")
    with pytest.raises(PolicyLost, match="rank because memory ran out: Task was killed due to 95%"):
        policy.offload()


def test_the_death_is_reported_instead_of_the_error_of_a_peer(policy):
    policy.ranks[0].answers["call"] = RayTaskError("call", "text", RuntimeError("reset by peer"))
    policy.ranks[1].answers["call"] = died(1)
    with pytest.raises(PolicyLost, match="^policy rank 1 died$"):
        policy.offload()


@pytest.mark.parametrize(
    "cause",
    [
        TrainingError("the loss is not finite"),
        ActorDiedError(),  # of an engine
        OutOfMemoryError("an engine was killed"),
    ],
)
def test_an_error_of_a_ranks_code_is_no_death(cause, policy):
    """Ray raises it as an instance of both classes."""
    policy.ranks[0].answers["call"] = RayTaskError("call", "text", cause).as_instanceof_cause()
    with pytest.raises(type(cause)) as raised:
        policy.offload()
    assert isinstance(raised.value, RayTaskError)
    policy.check()


def test_an_error_in_the_constructor_is_no_death():
    rank = Rank(0)
    rank.answers["where"] = RayActorError("id 0", "the folder is gone", actor_init_failed=True)
    with pytest.raises(RayActorError, match="the folder is gone"):
        Policy([rank])


def test_ranks_without_a_place(monkeypatch):
    """cluster.timeout_s, for new ranks of a lost policy"""
    waited = []

    def wait_in_vain(calls, timeout):
        waited.append(timeout)
        raise GetTimeoutError

    monkeypatch.setattr(actor.ray, "get", wait_in_vain)
    with pytest.raises(PolicyLost, match="no room for 2 new policy rank.s. after cluster.timeout"):
        Policy([Rank(0), Rank(1)], timeout_s=33)
    assert waited == [33]


def test_check_waits_for_no_call_in_progress(policy, monkeypatch):
    """A rank answers after it, and is asked again only then."""

    def asked() -> list[int]:
        return [rank.asked.count("where") for rank in policy.ranks]

    before = asked()
    wait = actor.ray.wait
    monkeypatch.setattr(actor.ray, "wait", lambda calls, **_: (calls[:1], calls[1:]))
    policy.check()
    assert asked() == before
    monkeypatch.setattr(actor.ray, "wait", wait)
    policy.check()
    assert asked() == [count + 1 for count in before]
