"""X15: launch/setup-gpu.sh and launch/test-gpu.sh, with stand-ins for Python, pip and nvcc;
launch/Dockerfile, parsed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), ROOT / "launch/slurm.sbatch"])
DOCKERFILE = ROOT / "launch/Dockerfile"
# Makes a venv with the stand-in below; otherwise it is the real Python.
PYTHON = f"""#!/bin/bash
if [[ "$1 $2" == "-m venv" ]]; then
    mkdir -p "$3/bin"
    cp "${{0%/*}}/venv-python" "$3/bin/python"
    cp "${{0%/*}}/venv-python" "$3/bin/megastep"
    exit
fi
exec {sys.executable} "$@"
"""
# Records its arguments; $FAIL: text in the arguments of a command that fails.
VENV_PYTHON = """#!/bin/bash
echo "$@" >>"$CALLS"
if [[ "$*" == *"torch.version.cuda"* ]]; then echo "${TORCH_CUDA-13.0}"; fi
if [[ -n "${FAIL:-}" && "$*" == *"$FAIL"* ]]; then
    echo "ERROR: no matching distribution" >&2
    exit 1
fi
"""
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Project:
    """A copy of the project's scripts, and the programs that they call."""

    def __init__(self, root: Path):
        self.root = root
        self.calls_file = root / "calls"
        scripts = [f"launch/{name}.sh" for name in ("setup", "setup-gpu", "test-gpu")]
        for name in ("pyproject.toml", *scripts):
            write(root / name, (ROOT / name).read_text())
        write(root / "launch/requirements-cpu.txt", "torch==2.13.0\n")
        write(root / "launch/requirements-te.txt", "transformer-engine==2.11.0\n")
        write(root / "bin/python3.11", PYTHON)
        write(root / "bin/venv-python", VENV_PYTHON)
        write(root / "cuda/bin/nvcc", NVCC)

    def run(self, *options: str, script="setup-gpu.sh", code=0, **variables: str) -> str:
        """Its stderr; `calls` then has the calls of .venv/bin/python."""
        self.calls_file.unlink(missing_ok=True)
        environment = {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(self.root / "bin/python3.11"),
            "CUDA_HOME": str(self.root / "cuda"),
            "CALLS": str(self.calls_file),
            **variables,
        }
        done = subprocess.run(
            [self.root / "launch" / script, *options],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
        assert done.returncode == code, done.stderr
        self.output = done.stdout
        return done.stderr

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def gpu_extra() -> dict[str, str]:
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = tree["project"]["optional-dependencies"]["gpu"]
    return {re.split(r"[\[=<>]", line)[0]: line for line in lines}


# ---------------------------------------------------------------- commands


def dry_run(project, *options) -> list[list[str]]:
    project.run("--dry-run", *options)
    return [shlex.split(line) for line in project.output.splitlines()]


def position(commands: list[list[str]], word: str) -> int:
    (found,) = [n for n, command in enumerate(commands) if word in command]
    return found


def test_the_order_of_the_commands(project):
    """torch, which Transformer Engine compiles against, then the build packages, then it."""
    commands = dry_run(project)
    extra = gpu_extra()
    steps = [
        position(commands, extra["torch"]),
        position(commands, "pybind11"),
        position(commands, extra["transformer-engine"]),
        position(commands, f"{project.root}[gpu,dev]"),
        position(commands, "import torch, transformer_engine.pytorch"),
        position(commands, "doctor"),
    ]
    assert steps == sorted(steps) and steps[-1] == len(commands) - 1
    assert not [
        c for c in commands if "apex" in str(c) or "DeepEP" in str(c) or "deep_ep" in str(c)
    ]


def test_transformer_engine_is_compiled_against_the_installed_torch(project):
    commands = dry_run(project)
    compiled = commands[position(commands, gpu_extra()["transformer-engine"])]
    assert "--no-build-isolation" in compiled and "NVTE_PYTORCH_FORCE_BUILD=TRUE" in compiled
    (headers,) = [word for word in compiled if word.startswith("CPATH=")]
    version = "{}.{}".format(*sys.version_info)
    site_packages = f".venv/lib/python{version}/site-packages/nvidia"
    folders = [
        f"{project.root}/{site_packages}/{name}/include" for name in ("cu13", "cudnn", "nccl")
    ]
    assert headers == "CPATH=" + ":".join(folders)


def test_optional_packages_are_compiled_and_imported(project):
    commands = dry_run(project, "--apex", "--deep-ep")
    (apex,) = [c for c in commands if "NVIDIA/apex@" in c[-1]]
    (deep_ep,) = [c for c in commands if "DeepEP@" in c[-1]]
    assert {"APEX_CPP_EXT=1", "APEX_CUDA_EXT=1", "--no-build-isolation"} <= set(apex)
    assert any(word.startswith("NVSHMEM_DIR=") for word in deep_ep)
    position(commands, "import torch, amp_C")
    position(commands, "import torch, deep_ep")


def test_a_dry_run_writes_nothing(project):
    before = sorted(project.root.rglob("*"))
    dry_run(project)
    assert sorted(project.root.rglob("*")) == before


# ---------------------------------------------------------------- installation


def installs(project) -> list[str]:
    return [call for call in project.calls if "pip install" in call]


def test_a_second_run_returns_at_once_until_something_changes(project):
    project.run()
    assert len(installs(project)) == 4 and project.calls[-1] == "doctor"
    project.run()
    assert project.calls == []
    project.run("--apex")
    assert len(installs(project)) == 5
    text = (project.root / "pyproject.toml").read_text()
    (project.root / "pyproject.toml").write_text(text + "\n# another\n")
    project.run("--apex")
    assert len(installs(project)) == 5


@pytest.mark.parametrize(
    "fails, message",
    [
        ("torch==2.13.0", "cannot install torch==2.13.0"),
        ("pybind11", "cannot install the build packages"),
        ("transformer-engine", "cannot compile Transformer Engine"),
        ("gpu,dev", "cannot install megastep and its dependencies"),
        ("import torch, vllm", "vllm was installed and cannot be imported"),
    ],
)
def test_a_failure_is_named_with_its_log_and_repeated(fails, message, project):
    errors = project.run(code=1, FAIL=fails)
    last = errors.splitlines()[-1]
    assert message in last and "full log: " in last
    assert "ERROR: no matching distribution" in errors
    assert not (project.root / ".venv/.installed-gpu").exists()
    assert (project.root / ".venv/.unfinished").exists()  # for setup.sh
    (project.root / ".venv/partly-written").touch()
    project.run()
    assert len(installs(project)) == 4 and not (project.root / ".venv/partly-written").exists()
    assert not (project.root / ".venv/.unfinished").exists()


def test_problems_of_the_machine_do_not_fail_the_installation(project):
    errors = project.run(FAIL="doctor")
    assert errors.splitlines()[-1].endswith("megastep doctor has found a problem of this machine")
    assert (project.root / ".venv/.installed-gpu").exists()


def test_a_cpu_environment_is_replaced_and_a_gpu_environment_kept(project):
    """setup.sh, which test.sh and local.sh call, would install the CPU packages over it."""
    write(project.root / ".venv/bin/python", VENV_PYTHON)
    (project.root / ".venv/.installed").write_text("of a CPU")
    (project.root / ".venv/lib").mkdir()
    project.run()
    assert not (project.root / ".venv/lib").exists()
    project.run(script="setup.sh")
    assert project.calls == [] and not (project.root / ".venv/.installed").exists()


# ---------------------------------------------------------------- what is missing


def test_a_missing_nvcc_is_exit_code_2(project):
    errors = project.run(code=2, CUDA_HOME="/nowhere")
    assert "no nvcc in /nowhere/bin" in errors and "CUDA_HOME" in errors
    assert not (project.root / ".venv").exists()


@pytest.mark.parametrize(
    "torch_cuda, message",
    [("12.8", "torch is built for CUDA 12.8"), ("", "a CPU build as torch==2.13.0")],
)
def test_a_torch_for_another_cuda_is_exit_code_2(torch_cuda, message, project):
    errors = project.run(code=2, TORCH_CUDA=torch_cuda)
    assert message in errors.splitlines()[-1]
    assert not any("transformer-engine" in call for call in project.calls)


def test_a_missing_python_is_exit_code_2(project):
    path = project.root / "pyproject.toml"
    changed = re.sub(r'requires-python = ".*"', 'requires-python = ">=3.99"', path.read_text())
    path.write_text(changed)
    assert "set PYTHON to its path" in project.run(code=2)


def test_an_unknown_option_is_exit_code_2(project):
    assert "unknown option --frob" in project.run("--frob", code=2)


def test_help(project):
    project.run("--help")
    for word in ("--apex", "--deep-ep", "--dry-run", "MAX_JOBS", "exit code"):
        assert word in project.output


# ---------------------------------------------------------------- launch/test-gpu.sh


def test_the_tests_need_an_environment(project):
    assert "run launch/setup-gpu.sh" in project.run(script="test-gpu.sh", code=2)


def test_the_tests_run_after_the_doctor_and_write_their_result(project):
    project.run()
    environment = 'echo "$MEGASTEP_GPU_RESULTS $CUDA_DEVICE_MAX_CONNECTIONS" >>"$CALLS"\n'
    write(project.root / ".venv/bin/python", VENV_PYTHON + environment)
    project.run("-x", "-k", "attention", script="test-gpu.sh")
    doctor, tests, variables = project.calls
    assert (doctor, tests) == ("doctor", "-m pytest tests/gpu -rs -x -k attention")
    assert variables == "gpu-results.json 1"


def test_the_tests_do_not_start_on_a_machine_with_a_problem(project):
    project.run()
    errors = project.run(script="test-gpu.sh", code=1, FAIL="doctor")
    assert project.calls == ["doctor"] and "solve the problems above" in errors


# ---------------------------------------------------------------- lint


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    subprocess.run(["shellcheck", "-x", *SCRIPTS], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint():
    subprocess.run(["hadolint", DOCKERFILE], check=True, timeout=60)


def instructions() -> list[list[str]]:
    """Of the Dockerfile: [instruction, word, ...]."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return [line.split() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_what_the_dockerfile_copies_exists_and_is_not_ignored():
    copied = set()
    stages = {words[3] for words in instructions() if words[0] == "FROM" and len(words) == 4}
    for _, *words in [words for words in instructions() if words[0] == "COPY"]:
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        else:
            copied |= set(words[:-1])
    assert {"pyproject.toml", "megastep", "launch", "tests"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / "launch/Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_the_dockerfile_builds_with_setup_gpu_and_a_supported_python():
    text = DOCKERFILE.read_text()
    assert "launch/setup-gpu.sh ${SETUP_OPTIONS}" in text
    version = re.search(r"^ARG PYTHON_VERSION=(.+)$", text, re.MULTILINE)[1]
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text())
    from packaging.specifiers import SpecifierSet

    assert f"{version}.9" in SpecifierSet(tree["project"]["requires-python"])
    # The major version of CUDA that Transformer Engine's requirement names.
    cuda = re.search(r"^ARG CUDA=(\d+)", text, re.MULTILINE)[1]
    assert f"core_cu{cuda}" in gpu_extra()["transformer-engine"]
