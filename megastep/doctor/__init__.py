"""`megastep doctor`: whether this machine and this installation can run megastep, and what to do.

    finding.py    a line of the report: verdict, what was found, advice
    facts.py      what is read from the outside: packages, limits, devices, libraries
    checks.py     facts → findings, without access to the outside
    probe.py      runs in a process of its own per library, so that an import that raises, crashes
                  or hangs is one line of the report

Starts without torch, Megatron, vLLM or Ray; the probes import them, all at once.
"""

from collections.abc import Callable, Iterable, Iterator

from megastep.doctor import checks, facts
from megastep.doctor.finding import Finding, Verdict, problem, summary, table_line

__all__ = ["Finding", "Verdict", "examine", "summary", "table_line"]


def examine() -> Iterator[Finding]:
    """Every finding; those of the operating system first, while the libraries are imported."""
    probes = {library: facts.start_probe(library) for library in facts.LIBRARIES}
    driver = facts.nvidia_driver()
    has_gpu = bool(driver.gpus)

    def of_library(name: str) -> dict:
        return facts.finish_probe(probes[name])

    yield from _guarded("packages", lambda: _packages(has_gpu))
    yield from _guarded("system", lambda: _system(driver))
    yield from _guarded("torch", lambda: checks.check_torch(of_library("torch"), driver))
    yield from _guarded("Megatron", lambda: checks.check_megatron(of_library("megatron")))
    yield from _guarded(
        "Transformer Engine",
        lambda: checks.check_transformer_engine(of_library("transformer_engine"), has_gpu),
    )
    yield from _guarded("vLLM", lambda: checks.check_vllm(of_library("vllm"), has_gpu))
    yield from _guarded("Ray", lambda: checks.check_ray(of_library("ray"), facts.ray_address()))


def _packages(has_gpu: bool) -> Iterator[Finding]:
    yield checks.check_python(*facts.python_versions())
    yield from checks.check_packages(facts.packages("gpu" if has_gpu else "cpu"), has_gpu)
    yield from checks.check_optional_packages(facts.optional_packages(), has_gpu)


def _system(driver: facts.Driver) -> Iterator[Finding]:
    has_gpu = bool(driver.gpus)
    adapters = facts.infiniband_adapters()
    yield checks.check_shared_memory(facts.shared_memory(), has_gpu)
    yield checks.check_open_files(facts.open_files(), has_gpu)
    yield checks.check_locked_memory(facts.locked_memory(), has_gpu, adapters)
    yield checks.check_adapters(adapters, has_gpu)
    yield from checks.check_interfaces(facts.interface_variables(), facts.interfaces())
    yield checks.check_slurm(facts.slurm(), len(driver.gpus))


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """A check that fails is a line of the report: the others still run."""
    try:
        yield from check()
    except Exception as error:
        advice = "this check failed; the installation may be incomplete"
        yield problem(name, f"{type(error).__name__}: {error}", advice)
