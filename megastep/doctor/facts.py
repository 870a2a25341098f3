"""What is read from the outside: packages, limits, devices, and libraries through their probes."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROBE_TIMEOUT_S = 180  # a first import from a network file system takes a minute
COMMAND_TIMEOUT_S = 30
CONNECT_TIMEOUT_S = 5
LIBRARIES = ("torch", "megatron", "transformer_engine", "vllm", "ray")  # of probe.py
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


# ---------------------------------------------------------------- packages


@dataclass(frozen=True)
class Package:
    name: str
    wanted: str  # version specifier, such as ==2.13.0
    installed: str | None
    fits: bool  # the installed version satisfies the specifier


def packages(extra: str) -> list[Package]:
    """The requirements of this installation of megastep, with an extra: `gpu` or `cpu`.

    Raises PackageNotFoundError where megastep is used without being installed.
    """
    from packaging.requirements import Requirement

    found = []
    for line in metadata.requires("megastep") or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": extra}):
            continue
        installed = installed_version(requirement.name)
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        found.append(Package(requirement.name, str(requirement.specifier), installed, fits))
    return found


def python_versions() -> tuple[str, bool, str]:
    """This Python, whether megastep supports it, and the versions that it supports."""
    from packaging.specifiers import SpecifierSet

    current = ".".join(map(str, sys.version_info[:3]))
    supported = metadata.metadata("megastep")["Requires-Python"]
    return current, current in SpecifierSet(supported), supported


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class OptionalPackages:
    apex: str | None  # version, "" if unknown; None: not installed
    apex_is_nvidias: bool
    deep_ep: str | None


def optional_packages() -> OptionalPackages:
    apex = find_spec("apex")
    folders = [] if apex is None else [*(apex.submodule_search_locations or [])]
    return OptionalPackages(
        apex=None if apex is None else installed_version("apex") or "",
        apex_is_nvidias=any(Path(folder, "multi_tensor_apply").is_dir() for folder in folders),
        deep_ep=None if find_spec("deep_ep") is None else installed_version("deep_ep") or "",
    )


# ---------------------------------------------------------------- operating system


@dataclass(frozen=True)
class Space:
    free_bytes: int
    total_bytes: int


def shared_memory() -> Space | None:
    """None: there is no /dev/shm."""
    if not Path("/dev/shm").is_dir():
        return None
    usage = shutil.disk_usage("/dev/shm")
    return Space(usage.free, usage.total)


def open_files() -> float:
    """The hard limit, to which Ray raises the soft one; inf: unlimited."""
    return _limit(resource.RLIMIT_NOFILE)[1]


def locked_memory() -> float:
    """Bytes, the soft limit; inf: unlimited."""
    return _limit(resource.RLIMIT_MEMLOCK)[0]


def _limit(kind: int) -> tuple[float, float]:
    soft, hard = resource.getrlimit(kind)
    infinite = resource.RLIM_INFINITY
    return (
        float("inf") if soft == infinite else soft,
        float("inf") if hard == infinite else hard,
    )


def infiniband_adapters() -> list[str]:
    return _names_in("/sys/class/infiniband")


def interfaces() -> list[str]:
    return _names_in("/sys/class/net")


def _names_in(folder: str) -> list[str]:
    path = Path(folder)
    return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []


def interface_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)}


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, as nvidia-smi or /proc reports it."""

    version: str | None  # None: there is no driver
    gpus: list[str]  # names
    error: str = ""


def nvidia_driver() -> Driver:
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:  # as in some containers
        gpus = _names_in("/proc/driver/nvidia/gpus")
        return Driver("of unknown version" if gpus else None, gpus)
    code, output = _output_of(query)
    if code != 0:
        return Driver("", [], error=" ".join(output.split())[:200])
    rows = [line.split(", ", 1) for line in output.splitlines() if ", " in line]
    return Driver(rows[0][0] if rows else "", [name for _, name in rows])


@dataclass(frozen=True)
class Slurm:
    version: str | None  # None: there is no sinfo
    job: str | None
    gpus_of_job: int | None  # on this node


def slurm() -> Slurm:
    version = None
    if shutil.which("sinfo") is not None:
        code, output = _output_of(["sinfo", "--version"])
        version = output.strip() if code == 0 else f"sinfo failed: {' '.join(output.split())[:120]}"
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return Slurm(
        version=version,
        job=os.environ.get("SLURM_JOB_ID"),
        gpus_of_job=int(gpus) if gpus.isdigit() else None,
    )


def _output_of(command: list[str]) -> tuple[int, str]:
    """Exit code, and stdout; stderr if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {COMMAND_TIMEOUT_S} s"
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr or done.stdout


@dataclass(frozen=True)
class RayAddress:
    address: str | None  # of RAY_ADDRESS
    error: str = ""  # why it cannot be reached
    token_unused: bool = False  # a token exists, RAY_AUTH_MODE does not name it


def ray_address() -> RayAddress:
    token_unused = (
        Path("~/.ray/auth_token").expanduser().is_file()
        and os.environ.get("RAY_AUTH_MODE") != "token"
    )
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return RayAddress(None, token_unused=token_unused)
    host, _, port = address.split("://")[-1].rpartition(":")
    if not port.isdigit():  # `auto`
        return RayAddress(address, token_unused=token_unused)
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return RayAddress(address, str(error.strerror or error), token_unused)
    return RayAddress(address, token_unused=token_unused)


# ---------------------------------------------------------------- libraries


@dataclass(frozen=True)
class Probe:
    process: subprocess.Popen
    deadline: float


def start_probe(library: str) -> Probe:
    process = subprocess.Popen(
        [sys.executable, "-m", "megastep.doctor.probe", library],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
    )
    return Probe(process, time.monotonic() + PROBE_TIMEOUT_S)


def finish_probe(probe: Probe) -> dict[str, Any]:
    """What the probe printed; `failed` has the reason if it could not."""
    try:
        output, errors = probe.process.communicate(timeout=probe.deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        probe.process.kill()
        probe.process.communicate()
        return {"failed": f"no end of its import in {PROBE_TIMEOUT_S} s"}
    try:
        return json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        last = (errors.strip().splitlines() or ["no output"])[-1]
        return {"failed": f"exit code {probe.process.returncode}: {last[:200]}"}
