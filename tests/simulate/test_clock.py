"""X8: simulated time: it jumps while the driver waits, and stands still while the driver works."""

import asyncio
import time

import pytest

from megastep.errors import RolloutFailed
from megastep.rollout.data import PromptStream
from megastep.rollout.pool import Pool
from megastep.simulate.clock import SimulatedStream
from megastep.types import Trajectory

HOUR = 3600.0


class SlowPool(Pool):
    samples_per_prompt = 2
    concurrency = 4

    def __init__(self, seconds: float = HOUR):
        self.seconds = seconds

    async def run_episode(self, prompt, index):
        await asyncio.sleep(self.seconds)
        return Trajectory(prompt.id, index, [])


class StuckPool(SlowPool):
    async def run_episode(self, prompt, index):
        await asyncio.get_running_loop().create_future()


def stream(pool: Pool, ahead: float = 0) -> SimulatedStream:
    return SimulatedStream(pool, PromptStream([{}] * 64, 0, False), batch=4, steps=8, ahead=ahead)


def test_hours_pass_at_once():
    begun = time.monotonic()
    with stream(SlowPool()) as simulated:
        taken = simulated.take(0)
        assert simulated.now() == 2 * HOUR  # 8 episodes, 4 at a time
        simulated.wait(90.0)
        assert simulated.now() == 2 * HOUR + 90
    assert len(taken.groups) == 4
    assert time.monotonic() - begun < 5


def test_no_time_passes_while_the_driver_works():
    """Episodes run ahead: their timers are due, but only while the driver waits."""
    with stream(SlowPool(0.001), ahead=1) as simulated:
        simulated.take(0)
        before = simulated.now()
        time.sleep(0.2)
        assert simulated.now() == before
        simulated.wait(1.0)
        assert simulated.now() == before + 1.0


def test_episodes_run_while_the_driver_waits():
    """The next batch takes an hour and starts when the first is taken."""
    with stream(SlowPool(HOUR / 2), ahead=1) as simulated:
        simulated.take(0)
        begun = simulated.now()
        simulated.wait(HOUR)
        simulated.take(1)
        assert simulated.now() == begun + HOUR


def test_a_simulation_in_which_nothing_can_happen_ends_with_an_error():
    with stream(StuckPool()) as simulated, pytest.raises(RolloutFailed, match="NothingHappens"):
        simulated.take(0)
