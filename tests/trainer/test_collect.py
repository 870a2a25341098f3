"""`megastep rollout` and `eval`: signals during episodes, unwritable output files."""

import asyncio
import os
import signal

import pytest

from megastep import signals
from megastep.trainer.collect import _run, _stoppable
from tests.bad_input.harness import CONFIG, rejected


def test_sigterm_in_an_episode_ends_the_command(monkeypatch):
    """The handler interrupts the main thread, here in environment code that catches everything."""
    closed = []

    async def episode(number: int) -> None:
        try:
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        except Exception:
            pytest.fail("an environment saw the signal")
        finally:
            closed.append(number)

    async def episodes() -> None:
        await asyncio.gather(*map(episode, range(3)))

    with signals.listening():
        signals.has_started()
        with pytest.raises(signals.Stopped, match="nothing was written"):
            asyncio.run(_stoppable(episodes()))
    assert sorted(closed) == [0, 1, 2]


def test_a_result_passes_through():
    async def work() -> int:
        return 7

    assert asyncio.run(_stoppable(work())) == 7


@pytest.mark.parametrize(
    "name, reason",
    [
        ("no/folder/x", "must be a file in a folder that is there"),
        (".", "must be a file in a folder that is there"),
        ("a\0b", "is not a file name"),
        ("x" * 300, "cannot be written (File name too long)"),
    ],
)
def test_out_that_cannot_be_written(name, reason, tmp_path):
    rejected("rollout", CONFIG, "--out", f"{tmp_path}/{name}", names=reason)


def test_invalid_input_leaves_no_log(tmp_path):
    rejected("rollout", CONFIG, "--out", f"{tmp_path}/x", "env.name=nope", names="env.name = nope")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["x" * 300, "a\0b"])
def test_view_of_an_invalid_path(path):
    rejected("view", path)


def test_the_result_of_a_command_is_not_formatted():
    """It may be gigabytes."""
    formatted = []

    class Result:
        def __repr__(self) -> str:
            formatted.append(self)
            return "result"

    async def work() -> list[Result]:
        return [Result()]

    (result,) = _run(work())
    assert isinstance(result, Result) and not formatted
