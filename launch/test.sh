#!/usr/bin/env bash
# Runs the tests; arguments go to pytest, paths are relative to the project's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh
# One thread per process: the ranks and the engine share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest "$@"
