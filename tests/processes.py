"""Processes from /proc: what a test started and what it left behind."""

import os
import re
import time
from pathlib import Path


def descendants(pid: int) -> set[tuple[int, str]]:
    """Every process below `pid`, as (pid, start time), since pids are reused."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
            except OSError:
                continue  # ended meanwhile
    found: set[tuple[int, str]] = set()
    pending = [pid]
    while pending:
        below = children.get(pending.pop(), [])
        pending += below
        found |= {(child, started(child)) for child in below}
    return found


def _stat(pid: int) -> list[str]:
    """Fields after the name, which may hold spaces: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def started(pid: int) -> str:
    try:
        return _stat(pid)[19]
    except OSError:
        return ""


def alive(processes: set[tuple[int, str]]) -> list[str]:
    """The command lines of those that still run."""
    left = []
    for pid, start in processes:
        try:
            stat = _stat(pid)
            if stat[19] == start and stat[0] != "Z":
                left.append(f"{pid} {command_line(pid)}")
        except OSError:
            continue
    return left


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode()


def shared_memory_of(processes: set[tuple[int, str]]) -> set[str]:
    """Named segments that these processes have mapped."""
    found = set()
    for pid, _ in processes:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return {path for path in found if os.path.exists(path)}


def ray_folders(processes: set[tuple[int, str]]) -> set[str]:
    """Temporary folders of the Ray instances of these processes."""
    found = set()
    for pid, _ in processes:
        try:
            found |= set(re.findall(r"/tmp/megastep-\w+", command_line(pid)))
        except OSError:
            continue
    return found


def wait_for(condition, timeout_s: float = 90, every_s: float = 0.1):
    """The first true result of `condition`."""
    deadline = time.time() + timeout_s
    while time.time() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(every_s)
    raise TimeoutError
