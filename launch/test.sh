#!/usr/bin/env bash
# Lint, types and tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
-h | --help)
    cat <<'USAGE'
usage: launch/test.sh [--fast | PYTEST_ARGUMENT ...]

  (no argument)     ruff, mypy and the whole suite, in two workers
  --fast            ruff, mypy and the tests without Ray, vLLM and Slurm: under three minutes
  PYTEST_ARGUMENT   pytest with these arguments, such as: tests/samples -k s13
USAGE
    exit 0
    ;;
esac

launch/setup.sh
if ! .venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check --no-deps \
    --require-hashes -r launch/requirements-adapters.txt; then
    echo "test.sh: launch/requirements-adapters.txt was not installed; its tests are skipped" >&2
fi
# One thread per process: ranks and engines share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if (($#)) && [[ "$1" != --fast ]]; then
    exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
if [[ "${1:-}" == --fast ]]; then
    exec .venv/bin/python -m pytest --numprocesses=2 -m "not cluster and not slow" "${@:2}"
fi
exec .venv/bin/python -m pytest --numprocesses=2
