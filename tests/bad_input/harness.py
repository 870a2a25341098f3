"""Bad input must end with exit code 2 and one line per problem: no traceback, no new process.

    rejected("train", CONFIG, "optimizer.lr=inf", names="optimizer.lr")

Commands run inside the test process, so that hundreds of cases take two minutes. An alarm ends a
hang. A command that would start Ray has accepted the input, which fails the case.
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
    """The command was about to start processes. No `except Exception` may swallow it."""


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
        raise Hang(f"no result within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def no_processes() -> Iterator[None]:
    """Raises Accepted where Ray would be started."""

    def accepted(*_, **__):
        raise Accepted("the command was about to start Ray")

    with (
        mock.patch("ray.init", accepted),
        mock.patch("megastep.cluster.Cluster.__enter__", accepted),
    ):
        yield


def run(*argv: str, limit_s: int = LIMIT_S) -> Result:
    """`megastep ARGV` in this process; exceptions that leave the command propagate."""
    out = io.StringIO()
    err = io.StringIO()
    term = signal.getsignal(signal.SIGTERM)  # the command replaces it
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


def rejected(*argv: str, names: str = "", limit_s: int = LIMIT_S) -> list[str]:
    """The error lines, one per problem; `names`: text that one of them must contain."""
    result = run(*argv, limit_s=limit_s)
    assert result.code == 2, f"exit code {result.code}\n{result.err}"
    check_lines(result.lines, names)
    return result.lines


def check_lines(lines: list[str], names: str = "") -> None:
    assert lines, "rejected without a message"
    assert not any("Traceback" in line for line in lines), "\n".join(lines)
    text = "\n".join(lines)
    prefixes = ("error: ", "megastep", "usage: ", "warning: ")
    is_usage = lines[0].startswith("usage: ")
    assert is_usage or all(line.startswith(prefixes) for line in lines), text
    longest = max(map(len, lines))
    assert longest <= LINE_LENGTH, f"a line of {longest} characters"
    assert any(names in line for line in lines), f"{names!r} is not in\n{text}"
