#!/usr/bin/env bash
# Runs all tests, in two workers; or what the arguments, which go to pytest, say. Paths: from the project's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh
# One thread per process: the ranks and the engine share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if (($# == 0)); then set -- --numprocesses=2; fi
exec .venv/bin/python -m pytest "$@"
