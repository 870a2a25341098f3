"""Progress on a terminal and in log files."""

import io
import os
import pty
import re
import time

from megastep import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(file) -> str:
    with console.progress("train", 8, "step", done=5, file=file) as bar:
        for reward in (0.5, 0.75, 1.0):
            bar.set_postfix_str(f"reward {reward}", refresh=False)
            bar.update()
    return file.getvalue()


def test_a_log_has_one_line_per_update(monkeypatch):
    monkeypatch.setattr(console, "LOG_EVERY_S", 0.0)
    lines = work(io.StringIO()).split("\n")
    assert [line.split(" [")[0] for line in lines] == [
        "train: 5/8",
        "train: 6/8",
        "train: 7/8",
        "train: 8/8",
        "",
    ]
    assert [line.split(", ")[-1] for line in lines[1:-1]] == [
        "reward 0.5]",
        "reward 0.75]",
        "reward 1.0]",
    ]
    assert "\r" not in "".join(lines) and "%|" not in "".join(lines)


def test_a_log_ends_with_the_last_state():
    """Even if all updates came within LOG_EVERY_S."""
    assert [line.split(" [")[0] for line in work(io.StringIO()).splitlines()] == [
        "train: 5/8",
        "train: 8/8",
    ]


def test_a_terminal_has_a_bar():
    shown = work(Terminal())
    assert shown.count("\n") == 1 and "\rtrain: 100%|" in shown


def test_a_terminal_without_a_size_has_a_bar():
    ours, theirs = pty.openpty()
    with open(theirs, "w") as file:
        with console.progress("train", 8, "step", file=file) as bar:
            bar.update(8)
    assert "train: 100%|" in os.read(ours, 10_000).decode()
    os.close(ours)


def test_a_wait_counts_its_seconds(monkeypatch):
    monkeypatch.setattr(console, "WAIT_LOG_EVERY_S", 0.05)
    log = io.StringIO()
    with console.waiting("engines", log):
        time.sleep(0.3)
    *counted, last = log.getvalue().splitlines()
    assert counted and all(re.fullmatch(r"engines: \d+ s, still waiting", line) for line in counted)
    assert re.fullmatch(r"engines: \d+ s", last)


def test_a_wait_on_a_terminal_is_one_line_even_if_it_fails():
    shown = Terminal()
    try:
        with console.waiting("engines", shown):
            time.sleep(1.6)
            raise OSError
    except OSError:
        pass
    assert re.fullmatch(r"(\rengines: [1-9]\d* s){2,}\n", shown.getvalue())
