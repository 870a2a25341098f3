#!/usr/bin/env bash
# Trains configs/local.yaml on this machine, without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
-h | --help)
    cat <<'USAGE'
usage: launch/local.sh [key=value ...]

Trains configs/local.yaml on this machine, without a GPU. The first run installs
into .venv (3.8 GB, about three minutes). Each key=value overrides an entry of the
config. Paths are relative to the project's root.
USAGE
    exit 0
    ;;
esac

launch/setup.sh
# One thread per process: the ranks and the engine share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/megastep train configs/local.yaml "$@"
