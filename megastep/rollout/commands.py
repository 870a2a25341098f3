"""Commands as agents: processes that end with their episode, and with this process.

A command runs in a process group and session of its own, with a clean environment: a few variables
of the shell, those that `agent.environment` names, and the address of the model. It reads its task
as JSON from stdin; the last line that it writes to stdout is its result.

A watchdog, one small process per Python process that runs commands, kills the groups that are left
when this process ends, however it ends.
"""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from megastep import redaction
from megastep.errors import EnvError
from megastep.text import one_line

# Variables of the shell that programs need and that hold no secrets.
INHERITED = (
    "HOME",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "LOGNAME",
    "PATH",
    "SHELL",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TMPDIR",
    "TZ",
    "USER",
)
GRACE_S = 2.0  # between SIGTERM and SIGKILL
PIPE_S = 2.0  # to read what the processes wrote before they ended
LINE_BYTES = 1 << 20  # of the result
ERROR_BYTES = 16_384  # of stderr that are kept
ERROR_CHARS = 600  # of stderr in the reason of a failure

# The command begins when the watchdog knows its group; it never does if this process ends before.
_GATE = 'read -r go || exit 1; exec "$@"'
_WATCHDOG = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    sign, group = line[0], int(line[1:])
    groups.add(group) if sign == "+" else groups.discard(group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


@dataclass(frozen=True)
class Command:
    arguments: tuple[str, ...]
    environment: tuple[str, ...] = ()  # names of further variables

    async def run(self, task: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
        """The result; raises EnvError for a program that fails or writes none."""
        process = await self._start(variables)
        _watchdog().add(process.group)
        text = b"\n" + json.dumps(task, default=str).encode() + b"\n"  # the first line: _GATE
        out = _Tail(process.stdout, LINE_BYTES)
        err = _Tail(process.stderr, ERROR_BYTES)
        works = (_feed(process.stdin, text), out.read(), err.read())
        pipes = [asyncio.ensure_future(work) for work in works]
        try:
            await process.exited.wait()
        finally:
            await process.end()
            _watchdog().remove(process.group)
            # A process that left the group may hold the pipes open.
            await asyncio.wait(pipes, timeout=PIPE_S)
            for pipe in pipes:
                pipe.cancel()
            process.transport.close()
        status = process.transport.get_returncode()
        assert status is not None
        if status != 0:
            raise EnvError(f"the command {_ended(status)}{_end_of(err.kept)}")
        return _result(out.kept, err.kept)

    async def _start(self, variables: dict[str, str]) -> "_Process":
        named = redaction.resolved({name: f"${{env:{name}}}" for name in self.environment})
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        loop = asyncio.get_running_loop()
        try:
            _, process = await loop.subprocess_exec(
                lambda: _Process(limit=1 << 16, loop=loop),
                *("/bin/sh", "-c", _GATE, "sh", *self.arguments),
                env=inherited | named | variables,
                start_new_session=True,
            )
            return process
        except OSError as error:
            raise EnvError(
                f"agent.command = {one_line(self.arguments[0])}: cannot be started "
                f"({error.strerror})"
            ) from None


class _Process(asyncio.subprocess.SubprocessStreamProtocol):
    """`exited` is set when the process ends, even if its children hold its pipes open, for which
    asyncio's own `Process.wait` waits."""

    transport: asyncio.SubprocessTransport
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop):
        super().__init__(limit, loop)
        self.exited = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport
        self.group = transport.get_pid()  # start_new_session: it leads its group

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()

    async def end(self) -> None:
        """End the process and all that it started in its group."""
        if not self.exited.is_set():
            _signal(self.group, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self.exited.wait()
        _signal(self.group, signal.SIGKILL)
        await self.exited.wait()


async def _feed(stdin: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it need not read its task
        stdin.write(text)
        await stdin.drain()
    stdin.close()


@dataclass
class _Tail:
    """The last bytes of a stream; a program that writes without end costs no memory."""

    stream: asyncio.StreamReader
    most: int
    kept: bytes = b""

    async def read(self) -> None:
        while chunk := await self.stream.read(1 << 16):
            self.kept = (self.kept + chunk)[-self.most :]


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _ended(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"


def _end_of(stderr: bytes) -> str:
    text = one_line(stderr.decode(errors="replace"), ERROR_BYTES)
    return f"; the end of its stderr: {text[-ERROR_CHARS:]}" if text else ""


def _result(stdout: bytes, stderr: bytes) -> dict[str, Any]:
    lines = stdout.decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else ""
    try:
        result = json.loads(last)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict) or "reward" not in result:
        raise EnvError(
            f"the last line of the command's stdout is {one_line(last, 80)!r}; "
            f'{{"reward": 0.5, "metrics": {{}}}} is needed{_end_of(stderr)}'
        )
    return result


class _Watchdog:
    """Kills the groups that are left when the pipe from this process closes."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHDOG],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
            text=True,
        )

    def add(self, group: int) -> None:
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # killed by the user
            self._process.stdin.write(line)
            self._process.stdin.flush()


@functools.cache
def _watchdog() -> _Watchdog:
    return _Watchdog()
