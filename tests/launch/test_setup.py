"""launch/setup.sh and its pins under every supported Python; pip is a stand-in."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import Tag

from tools import hash_pins

ROOT = Path(__file__).resolve().parents[2]
PINS = (ROOT / "launch/requirements-cpu.txt").read_text()
COMMANDS = "bash cat cp cut dirname env find flock grep mkdir rm sha256sum tail touch".split()
# Python 3.{minor}: logs the calls of pip, whose answer to the CPU build of torch is a variable.
PYTHON = """#!{bash}
case "$1" in
-c) exec {real} -c "import sys; sys.version_info = (3, {minor}, 0); $2" ;;
esac
case "$2" in
venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "3.{minor}" >>"$CALLS" ;;
pip)
    echo "${{*:4}}" >>"$CALLS"
    if [[ "$*" == *"+cpu"* && -n "${{NO_CPU_BUILD:-}}" ]]; then
        echo "ERROR: No matching distribution found for torch==2.13.0+cpu"
        exit 1
    fi
    ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A project with the real setup.sh, and a PATH without any Python."""
    pins = ("launch/requirements-cpu.txt", "launch/requirements-te.txt")
    for name in ("launch/setup.sh", *pins, "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in COMMANDS:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    return tmp_path


def add_python(project, minor: int, name: str | None = None) -> Path:
    path = project / "bin" / (name or f"python3.{minor}")
    path.write_text(PYTHON.format(bash=shutil.which("bash"), real=sys.executable, minor=minor))
    path.chmod(0o755)
    return path


def run(project, **variables) -> subprocess.CompletedProcess:
    return subprocess.run(
        [project / "launch/setup.sh"],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            "PATH": str(project / "bin"),
            "HOME": os.environ["HOME"],
            "CALLS": str(project / "calls"),
            **variables,
        },
    )


def calls(project) -> list[str]:
    return (project / "calls").read_text().splitlines()


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_x15_setup_takes_each_python(project, minor):
    add_python(project, minor)
    ended = run(project)
    assert ended.returncode == 0, ended.stderr
    python, torch, pins, wheels, megastep = calls(project)
    assert python == f"3.{minor}"
    assert "--require-hashes" in wheels and wheels.endswith("launch/requirements-te.txt")
    assert torch.endswith("--no-deps torch==2.13.0+cpu")
    assert "--no-deps --require-hashes -r" in pins and megastep.endswith(f"-e {project}")
    assert (project / ".venv/.installed").is_file()


def test_x15_setup_prefers_the_oldest_python(project):
    for minor in (13, 12, 11):
        add_python(project, minor)
    assert run(project).returncode == 0
    assert calls(project)[0] == "3.11"


@pytest.mark.parametrize("minor", [10, 14])
def test_x15_setup_rejects_other_pythons(project, minor):
    add_python(project, minor, "python3")
    ended = run(project)
    assert ended.returncode == 2
    assert "Python 3.11, 3.12 or 3.13 with the venv module is required" in ended.stderr


def test_x15_setup_takes_no_other_python_than_the_one_named(project):
    add_python(project, 11)
    ended = run(project, PYTHON=str(add_python(project, 14, "mine")))
    assert ended.returncode == 2 and "mine is not Python 3.11, 3.12 or 3.13" in ended.stderr
    ended = run(project, PYTHON=str(add_python(project, 13, "mine")))
    assert ended.returncode == 0 and calls(project)[0] == "3.13"


def test_x15_setup_installs_into_another_folder(project):
    add_python(project, 12)
    assert run(project, VENV=str(project / "other")).returncode == 0
    assert (project / "other/.installed").is_file() and not (project / ".venv").exists()


def test_x15_setup_takes_the_cuda_build_with_its_libraries_in_the_end(project):
    add_python(project, 13)
    ended = run(project, NO_CPU_BUILD="1")
    assert ended.returncode == 0, ended.stderr
    _, *torch, _, _, _ = calls(project)
    assert [call.rpartition(" ")[2] for call in torch] == [
        "torch==2.13.0+cpu",
        "torch==2.13.0+cpu",
        "torch==2.13.0",
    ]
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in torch[1]
    assert "--no-deps" not in torch[2]


# ---------------------------------------------------------------- pins


def entries() -> dict[hash_pins.Pin, tuple[list[str], int]]:
    """Per pin: the kinds of its files, and the number of its hashes."""
    _, pins = hash_pins.read_pins(PINS)
    blocks = re.split(r"^(?=# )", PINS.partition("\n\n")[2], flags=re.MULTILINE)
    by_pin = {}
    for block in blocks:
        kinds = block.splitlines()[0].removeprefix("# ").split(", ") if block else []
        for pin in pins:
            if f"\n{pin} \\" in block:
                by_pin[pin] = (kinds, block.count("--hash=sha256:"))
    assert set(pins) - set(by_pin) == {pin for pin in pins if pin.name == "torch"}
    return by_pin


def fits(kind: str, python: tuple[int, int]) -> bool:
    interpreters, abi = kind.split("-")
    found = {
        Tag(interpreter, abi, platform)
        for interpreter in interpreters.split(".")
        for platform in ("any", *hash_pins.PLATFORMS)
    }
    return bool(found & hash_pins.tags(python))


def uncovered(pin: hash_pins.Pin, kinds: list[str]) -> list[tuple[int, int]]:
    """Pythons without a wheel of a package that has wheels; a source would need a compiler."""
    wheels = [kind for kind in kinds if kind != "source"]
    if not wheels:
        return [] if kinds else pin.pythons()
    return [p for p in pin.pythons() if not any(fits(kind, p) for kind in wheels)]


def test_x15_every_pin_has_a_file_for_every_python():
    for pin, (kinds, hashes) in entries().items():
        assert len(kinds) == hashes > 0, pin
        assert uncovered(pin, kinds) == [], f"{pin}: run tools/hash_pins.py"


@pytest.mark.parametrize(
    ("kinds", "missing"),
    [
        ("cp311-cp311, cp312-cp312, cp313-cp313, source", []),
        ("cp38-abi3", []),
        ("py2.py3-none, source", []),
        ("source", []),
        ("cp311-cp311, cp312-cp312, source", [(3, 13)]),
        ("cp312-abi3, source", [(3, 11)]),
    ],
)
def test_which_pythons_files_cover(kinds, missing):
    assert uncovered(hash_pins.Pin("name", "1.0", ""), kinds.split(", ")) == missing


def test_x15_every_python_has_one_version_of_each_package():
    _, pins = hash_pins.read_pins(PINS)
    for python in hash_pins.PYTHONS:
        names = [pin.name for pin in pins if python in pin.pythons()]
        assert len(names) == len(set(names)) and "megatron-core" in names


def test_x15_pins_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    _, pins = hash_pins.read_pins(PINS)
    for text in project["optional-dependencies"]["cpu"]:
        wanted = Requirement(text)
        (version,) = (clause.version for clause in wanted.specifier)
        marker = str(wanted.marker or "")
        plain = [(pin.name, pin.version.removesuffix("+cpu"), pin.marker) for pin in pins]
        assert (wanted.name, version, marker) in plain
    supported = Requirement(f"python{project['requires-python']}").specifier
    assert [m for m in range(9, 17) if supported.contains(f"3.{m}")] == [11, 12, 13]
    assert hash_pins.PYTHONS == tuple((3, m) for m in (11, 12, 13))


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("numpy-2.3.5-cp313-cp313-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", "cp313-cp313"),
        ("numpy-2.3.5-cp313-cp313-manylinux_2_27_aarch64.whl", None),
        ("numpy-2.3.5-cp314-cp314-manylinux_2_27_x86_64.whl", None),
        ("numpy-2.3.4-cp313-cp313-manylinux_2_27_x86_64.whl", None),
        ("numpy-2.3.5-cp38-abi3-musllinux_1_2_x86_64.whl", None),
        ("numpy-2.3.5-cp38-abi3-manylinux2014_x86_64.whl", "cp38-abi3"),
        ("numpy-2.3.5-py3-none-any.whl", "py3-none"),
        ("numpy-2.3.5.tar.gz", "source"),
        ("numpy-2.3.5.win32-py3.11.exe", None),
    ],
)
def test_files_that_pip_may_choose(file, kind):
    assert hash_pins.kind(file, hash_pins.Pin("numpy", "2.3.5", "")) == kind


def test_a_marker_limits_the_pythons_of_a_pin():
    old = hash_pins.Pin("name", "1.0", 'python_version < "3.12"')
    assert old.pythons() == [(3, 11)]
    assert hash_pins.kind("name-1.0-cp312-cp312-manylinux1_x86_64.whl", old) is None
