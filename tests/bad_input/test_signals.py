"""SIGTERM and SIGINT to real processes at any time: exit code 75 or 130, and one line."""

import signal
import time
from pathlib import Path

import pytest

from tests.processes import descendants, ray_folders, wait_for
from tests.runs import BARE, begin, left, megastep

WORDS = {signal.SIGTERM: ("stopped", 75), signal.SIGINT: ("interrupted", 130)}
ENDLESS = (*BARE, "env.name=tests.envs.broken:Endless", "data.train=generated")
both = pytest.mark.parametrize("number", WORDS, ids=lambda number: number.name)


@pytest.fixture(autouse=True)
def began(tmp_path, monkeypatch):
    """The file that the environment creates when it is asked for rows."""
    monkeypatch.setenv("ENDLESS_BEGAN", str(tmp_path / "began"))


def takes_signals(pid: int) -> bool:
    """SIGTERM has a handler: Python has started."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def ends_well(process, number: signal.Signals) -> str:
    """The only line on stderr."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=90)
    word, code = WORDS[number]
    lines = [line for line in errors.splitlines() if line]
    assert process.returncode == code, (process.returncode, errors)
    assert len(lines) == 1 and lines[0].startswith(word), errors
    return lines[0]


@both
@pytest.mark.parametrize("delay_s", [0.0, 0.5], ids=lambda seconds: f"after {seconds} s")
def test_a_signal_while_python_imports(number, delay_s, tmp_path):
    """Nothing has started, so that no checkpoint is mentioned. The rows of ENDLESS never come."""
    process = begin(megastep("train", tmp_path, "r", *ENDLESS))
    wait_for(lambda: takes_signals(process.pid))
    time.sleep(delay_s)
    assert ends_well(process, number) == f"{WORDS[number][0]} before anything was started"


@both
def test_a_signal_while_data_is_read(number, tmp_path):
    process = begin(megastep("train", tmp_path, "r", *ENDLESS))
    wait_for((tmp_path / "began").exists)
    assert ends_well(process, number) == f"{WORDS[number][0]} before anything was started"


@both
def test_a_signal_while_ray_starts(number, tmp_path):
    """Ray's processes exist and end too, though Ray has not answered yet."""
    process = begin(megastep("train", tmp_path, "r", *BARE))
    wait_for(lambda: any("gcs_server" in line for line in left(descendants(process.pid))))
    folders = wait_for(lambda: ray_folders(descendants(process.pid)))
    line = ends_well(process, number)
    assert line == f"{WORDS[number][0]}; no checkpoint was written yet"
    assert not any(Path(folder).exists() for folder in folders)
