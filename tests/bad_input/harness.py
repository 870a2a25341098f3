"""What every case of bad input must lead to: exit code 2, one line per problem, no traceback, no process started.

    refused("train", CONFIG, "optimizer.lr=inf", names="optimizer.lr")

Commands run inside the test process: hundreds of cases fit into two minutes. A hang is cut off by an alarm, and a
command that would start Ray has accepted the input, which fails the case.
"""

import contextlib
import io
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from megastep import cli

CONFIG = "configs/chase.yaml"
LIMIT_S = 10
LINE_LENGTH = 600


class Accepted(BaseException):
    """The command went on to start processes. No `except Exception` may swallow it."""


class Hang(BaseException):
    """The command took longer than LIMIT_S."""


@dataclass
class Result:
    code: int | None
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def ring(*_):
        raise Hang(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def no_processes() -> Iterator[None]:
    """Whoever starts Ray here has accepted the input."""

    def accepted(*_, **__):
        raise Accepted("the command went on to start Ray")

    with (
        mock.patch("ray.init", accepted),
        mock.patch("megastep.cluster.Cluster.__enter__", accepted),
    ):
        yield


def run(*argv: str, limit_s: int = LIMIT_S) -> Result:
    """`megastep ARGV` in this process. An exception that leaves the command is the test's failure."""
    out, err = io.StringIO(), io.StringIO()
    term = signal.getsignal(signal.SIGTERM)  # the command takes it
    with (
        no_processes(),
        time_limit(limit_s),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = cli.main([str(argument) for argument in argv])
        except SystemExit as exit:  # argparse
            code = exit.code
        finally:
            signal.signal(signal.SIGTERM, term)
    return Result(code, out.getvalue(), err.getvalue())


def refused(*argv: str, names: str = "", limit_s: int = LIMIT_S) -> list[str]:
    """The lines of a refusal, one for each problem; `names`: what one of them must mention."""
    result = run(*argv, limit_s=limit_s)
    assert result.code == 2, f"exit code {result.code}\n{result.err}"
    check_lines(result.lines, names)
    return result.lines


def check_lines(lines: list[str], names: str = "") -> None:
    assert lines, "refused without a word"
    assert not any("Traceback" in line for line in lines), "\n".join(lines)
    told = [
        line for line in lines if line.startswith(("error: ", "megastep", "usage: ", "warning: "))
    ]
    assert told == lines or lines[0].startswith("usage: "), "\n".join(lines)
    assert all(len(line) <= LINE_LENGTH for line in lines), (
        f"a line of {max(map(len, lines))} characters"
    )
    assert any(names in line for line in lines), f"{names!r} is not named in\n" + "\n".join(lines)
