#!/usr/bin/env bash
# The tests of a GPU node, and their result as JSON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
-h | --help)
    cat <<'USAGE'
usage: launch/test-gpu.sh [PYTEST_ARGUMENT ...]

Runs `megastep doctor`, then tests/gpu, and writes gpu-results.json, which can be pasted into an issue: the findings of
the doctor, and of each test its outcome, time, figures and error. Expected figures: tests/gpu/README.md. Tests that
need more GPUs than there are, or any without one, are skipped. Install first with launch/setup-gpu.sh.

  PYTEST_ARGUMENT   such as: -x -k attention

variables:
  MEGASTEP_GPU_RESULTS   the file to write; default: gpu-results.json

exit code: that of pytest; 1 if the doctor has found a problem, 2 if there is no .venv
USAGE
    exit 0
    ;;
esac

if [[ ! -x .venv/bin/python ]]; then
    echo "test-gpu: there is no .venv: run launch/setup-gpu.sh" >&2
    exit 2
fi
.venv/bin/megastep doctor || {
    echo "test-gpu: solve the problems above first, or run: .venv/bin/python -m pytest tests/gpu" >&2
    exit 1
}
export MEGASTEP_GPU_RESULTS="${MEGASTEP_GPU_RESULTS:-gpu-results.json}"
# Megatron's tensor parallelism, before Blackwell; see docs/gpus.md.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec .venv/bin/python -m pytest tests/gpu -rs "$@"
