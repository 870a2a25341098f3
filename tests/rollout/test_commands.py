"""Processes of command agents end with their episode, and with the process that started them."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from megastep.rollout.commands import Command
from megastep.rollout.program import CommandProgram
from tests.processes import wait_for

from .agents import run_agent

# Writes its own process id and that of a child that ignores SIGTERM, then waits.
FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
'''])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def family(path, end: str) -> tuple[str, ...]:
    return (sys.executable, "-c", FAMILY + end, str(path))


@pytest.mark.parametrize("end", ["time.sleep(600)", "sys.exit(3)", "print('{\"reward\": 1}')"])
def test_children_end_with_the_episode(tmp_path, end):
    """After a time limit, a failure and a result."""
    path = tmp_path / "pids"
    start_s = time.monotonic()
    trajectory, _, _ = run_agent(CommandProgram(Command(family(path, end))), timeout_s=3.0)
    assert trajectory.stop_reason == ("env_timeout" if "600" in end else "env_error")
    assert time.monotonic() - start_s < 20
    pids = [int(pid) for pid in path.read_text().split()]
    assert len(pids) == 2
    wait_for(lambda: not any(map(is_alive, pids)), 5)


def test_a_cancelled_episode_ends_its_command(tmp_path):
    path = tmp_path / "pids"

    async def cancel():
        command = Command(family(path, "time.sleep(600)"))
        running = asyncio.ensure_future(command.run({}, {}))
        while not path.exists():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(cancel())
    pids = [int(pid) for pid in path.read_text().split()]
    wait_for(lambda: not any(map(is_alive, pids)), 5)


WORKER = """
import asyncio, sys
from megastep.rollout.commands import Command
asyncio.run(Command(tuple(sys.argv[1:])).run({}, {}))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_commands_end_with_the_process_that_started_them(tmp_path, number):
    path = tmp_path / "pids"
    command = [sys.executable, "-c", WORKER, *family(path, "time.sleep(600)")]
    worker = subprocess.Popen(command)
    wait_for(path.exists, 60)
    pids = [int(pid) for pid in path.read_text().split()]
    assert all(map(is_alive, pids))
    os.kill(worker.pid, number)
    worker.wait(10)
    wait_for(lambda: not any(map(is_alive, pids)), 10)


KILLED = """
import os, signal
from megastep.rollout import commands
commands._Watchdog.add = lambda self, group: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_command_does_not_begin_before_the_watchdog_knows_it(tmp_path):
    """The process that starts it is killed in between."""
    path = tmp_path / "pids"
    command = [sys.executable, "-c", KILLED + WORKER, *family(path, "time.sleep(600)")]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    time.sleep(1)
    assert not path.exists()
