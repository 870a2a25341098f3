#!/usr/bin/env bash
# Trains a recipe on this machine, without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'USAGE'
usage: launch/local.sh [RECIPE] [key=value ...]

Trains on this machine, without a GPU.

  arithmetic   (default) SmolLM2-135M-Instruct learns to use a calculator
  chase        a tiny mixture-of-experts model with expert parallelism and routing replay

The first run installs into .venv (3.8 GB, about three minutes); arithmetic also
downloads its model (93 MB) into models/. Each key=value overrides an entry of the
recipe's config. Paths are relative to the project's root.
USAGE
}

recipe=arithmetic
case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
*=* | "") ;;
*)
    recipe="$1"
    shift
    ;;
esac

case "$recipe" in
arithmetic) config=configs/arithmetic.yaml model=smollm2-135m ;;
chase) config=configs/local.yaml model="" ;;
*)
    echo "error: $recipe: no such recipe" >&2
    usage >&2
    exit 2
    ;;
esac

launch/setup.sh
# The recipe's own model, unless another is given.
if [[ -n "$model" && ! -e "models/$model" && " $*" != *" model.path="* ]]; then
    .venv/bin/python tools/get_model.py "$model" "models/$model"
fi
exec .venv/bin/megastep train "$config" "$@"
