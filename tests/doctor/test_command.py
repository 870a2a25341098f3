"""X15: `megastep doctor`, here and with the outside of a GPU node."""

import json
import subprocess
import sys

import pytest

from megastep import doctor
from megastep.doctor import facts
from megastep.doctor.finding import Verdict
from tests.bad_input.harness import run
from tests.doctor.test_checks import BROKEN, DRIVER, GIB, TORCH, VLLM

LIBRARIES = {
    "torch": TORCH,
    "megatron": {"version": "0.16.1", "routing_replay": True},
    "transformer_engine": {"version": "2.11.0", "attention": "cuDNN, 1"},
    "vllm": VLLM,
    "ray": {"version": "2.60.0"},
}


@pytest.fixture
def gpu_node(monkeypatch):
    """The outside of a node with two H100; returns what its libraries report."""
    libraries = dict(LIBRARIES)
    outside = {
        "start_probe": lambda library: library,
        "finish_probe": lambda library: libraries[library],
        "nvidia_driver": lambda: DRIVER,
        "packages": lambda extra: [facts.Package("vllm", "==0.30.0", "0.30.0", extra == "gpu")],
        "optional_packages": lambda: facts.OptionalPackages(None, False, None),
        "shared_memory": lambda: facts.Space(60 * GIB, 64 * GIB),
        "open_files": lambda: 65536,
        "locked_memory": lambda: float("inf"),
        "infiniband_adapters": lambda: ["mlx5_0"],
        "interface_variables": lambda: {},
        "slurm": lambda: facts.Slurm("slurm 24.05", "71", 2),
        "ray_address": lambda: facts.RayAddress(None),
    }
    for name, function in outside.items():
        monkeypatch.setattr(facts, name, function)
    return libraries


def test_a_good_gpu_node_has_exit_code_0(gpu_node):
    result = run("doctor")
    assert result.code == 0, result.out
    lines = result.out.splitlines()
    assert lines[-1] == "0 problems, 0 warnings"
    assert all(line.startswith("ok ") for line in lines[:-1])
    names = ("vllm ", "GPU 0", "GPU 1", "NCCL", "TE attention", "vLLM sleep mode", "shared memory")
    for name in (*names, "locked memory", "open files", "Slurm", "Ray"):
        assert any(f" {name}" in line for line in lines), name


def test_a_problem_has_exit_code_1_and_advice(gpu_node):
    gpu_node["transformer_engine"] = BROKEN
    result = run("doctor")
    assert result.code == 1
    lines = result.out.splitlines()
    (at,) = [n for n, line in enumerate(lines) if line.startswith("problem ")]
    assert "libcudart" in lines[at] and "→ run launch/setup-gpu.sh" in lines[at + 1]
    assert lines[-1] == "1 problem, 0 warnings"


def test_a_warning_has_exit_code_0(gpu_node, monkeypatch):
    monkeypatch.setattr(facts, "open_files", lambda: 1024)
    result = run("doctor")
    assert result.code == 0 and result.out.endswith("0 problems, 1 warning\n")


def test_a_check_that_fails_is_a_line_and_the_others_run(gpu_node, monkeypatch):
    def fail(extra):
        raise ModuleNotFoundError("No module named 'packaging'")

    monkeypatch.setattr(facts, "packages", fail)
    findings = list(doctor.examine())
    (problem,) = [f for f in findings if f.verdict == Verdict.PROBLEM]
    assert problem.found == "ModuleNotFoundError: No module named 'packaging'"
    assert findings[-1].name == "Ray"


def test_json(gpu_node):
    gpu_node["vllm"] = VLLM | {"sleep": False}
    result = run("doctor", "--json")
    report = json.loads(result.out)
    assert result.code == 0 and report["python"] == sys.version.split()[0]
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert by_name["vLLM sleep mode"]["verdict"] == "warning"
    assert set(by_name["NCCL"]) == {"name", "verdict", "found", "advice"}


def test_help_names_the_exit_codes():
    assert "0 if there is no problem, 1 otherwise" in " ".join(run("doctor", "--help").out.split())


def test_this_machine():
    """The real libraries, in a process of its own: the versions that they have here."""
    done = subprocess.run(
        [sys.executable, "-m", "megastep", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    problems = [f for f in found.values() if f["verdict"] == "problem"]
    assert done.returncode == (1 if problems else 0), done.stderr
    # Of the machine, not of the installation.
    assert not {f["name"] for f in problems} - {"shared memory", "Slurm", "Ray"}, problems
    assert "with routing replay" in found["Megatron"]["found"]
    assert found["vLLM routed experts"]["found"] == "returned"
    assert "megastep_shm" in found["vLLM weight transfer"]["found"]
    assert "a local Ray per run" in found["Ray"]["found"] or "at " in found["Ray"]["found"]
