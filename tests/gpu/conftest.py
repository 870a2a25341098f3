"""Skips without GPUs, and writes the result of a run as JSON.

fp32 is compared without TF32, which NVIDIA's libraries leave out if NVIDIA_TF32_OVERRIDE is 0; the
processes of the tests inherit it. `tf32_ranks` are ranks with it.
"""

import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.gpu.expected import EXPECTED
from tests.gpu.results import Results
from tests.ranks import RankPool

RESULTS_VARIABLE = "MEGASTEP_GPU_RESULTS"  # a file
TF32_VARIABLE = "NVIDIA_TF32_OVERRIDE"
results = Results()


def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_ours(nodeid: str) -> bool:
    return nodeid.startswith("tests/gpu/")


def pytest_collection_modifyitems(items):
    ours = [item for item in items if is_ours(item.nodeid)]
    found = gpu_count()
    if ours and found:
        os.environ.setdefault(TF32_VARIABLE, "0")  # before any process uses a GPU
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        needed = next((mark.args[0] for mark in item.iter_markers("gpus")), 1)
        if found == 0:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {found}"))


def pytest_runtest_logreport(report):
    if is_ours(report.nodeid):
        results.add(report)


def pytest_sessionfinish():
    path = os.environ.get(RESULTS_VARIABLE)
    if path is None or not results.tests:
        return
    environment = []
    if gpu_count():
        from megastep.doctor import examine

        environment = [asdict(finding) for finding in examine()]
    results.write(Path(path), environment)


def pytest_terminal_summary(terminalreporter):
    path = os.environ.get(RESULTS_VARIABLE)
    if path is not None and results.tests:
        terminalreporter.write_line(f"results: {path}")


@pytest.fixture
def figure(record_property):
    """`figure(name, value)`: record a figure of expected.py, and check its limit."""

    def check(name: str, value: float) -> None:
        record_property(name, value)
        limit = EXPECTED[name].limit
        assert value <= limit, f"{name}: {value:.3g}, expected at most {limit:g}"

    return check


@pytest.fixture
def tf32_ranks(monkeypatch):
    """One rank with TF32, as Transformer Engine multiplies fp32 matrices by default."""
    monkeypatch.delenv(TF32_VARIABLE, raising=False)
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture
def free_gpus():
    """Without the ranks of other tests, whose CUDA contexts take memory."""
    from tests.conftest import close_pools

    close_pools()
