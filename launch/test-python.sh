#!/usr/bin/env bash
# The tests without Ray, vLLM and Slurm under another Python, in an environment of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'USAGE'
usage: launch/test-python.sh 3.11|3.12|3.13 [PYTEST_ARGUMENT ...]

  3.13              installs into .venv-3.13 and runs the tests that are neither `cluster` nor `slow`
  PYTEST_ARGUMENT   other tests, such as: tests/policy -m "not cluster"

The interpreter is python3.13 of the PATH, or the newest 3.13 of pyenv. Packages: launch/requirements-cpu.txt, with
Megatron-Core 0.16.1 on Python 3.11 and 0.19.2 on 3.12 and 3.13.
USAGE
}

version="${1:-}"
case "$version" in
3.11 | 3.12 | 3.13) ;;
-h | --help) usage && exit 0 ;;
*) usage >&2 && exit 2 ;;
esac

# A shim of pyenv exists for versions that are not selected, and fails.
find_python() {
    local python
    for python in "python$version" $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python 2>/dev/null | sort -rV); do
        if "$python" -c 'import ensurepip' 2>/dev/null; then echo "$python" && return; fi
    done
    echo "error: no Python $version with the venv module, neither on the PATH nor in pyenv" >&2
    exit 2
}

VENV="${VENV:-.venv-$version}"
PYTHON="$(find_python)"
export VENV PYTHON
launch/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$VENV/bin/python" -c 'import importlib.metadata as m, platform; print("Python", platform.python_version(), *(f"{p} {m.version(p)}" for p in ("torch", "megatron-core")))'
if (($# > 1)); then exec "$VENV/bin/python" -m pytest "${@:2}"; fi
exec "$VENV/bin/python" -m pytest --numprocesses=2 -m "not cluster and not slow"
