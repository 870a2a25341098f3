#!/usr/bin/env bash
# Trains a recipe on this machine, without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'USAGE'
usage: launch/local.sh [RECIPE] [key=value ...]

Trains on this machine, without a GPU.

  arithmetic   (default) SmolLM2-135M-Instruct learns to use a calculator
  sql          SmolLM2-135M-Instruct queries SQLite databases
  search       SmolLM2-135M-Instruct looks facts up in a retrieval server
  chase        a tiny mixture-of-experts model with expert parallelism and routing replay

The first run installs into .venv (3.8 GB, about three minutes); all but chase also
download their model (93 MB) into models/, sql and search write their data into data/.
Each key=value overrides an entry of the recipe's config. Paths are relative to the
project's root.
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
arithmetic | sql | search) config="configs/$recipe.yaml" model=smollm2-135m ;;
chase) config=configs/local.yaml model="" ;;
*)
    echo "error: $recipe: no such recipe" >&2
    usage >&2
    exit 2
    ;;
esac
is_given() { [[ " $overrides" == *" $1="* ]]; }
overrides="$*"

launch/setup.sh
if [[ -n "$model" && ! -e "models/$model" ]] && ! is_given model.path; then
    .venv/bin/python tools/get_model.py "$model" "models/$model"
fi
# demonstrations.jsonl is written last.
data="data/$recipe"
if [[ -f "megastep/envs/${recipe}_data.py" && ! -e "$data/demonstrations.jsonl" ]]; then
    .venv/bin/python -m "megastep.envs.${recipe}_data" "$data"
fi
if [[ "$recipe" == search ]] && ! is_given env.options.url; then
    # The server ends with this process, which becomes the training command.
    read -r server < <(
        exec .venv/bin/python -m megastep.envs.retrieval "$data/corpus.jsonl" --port 0 --with-parent
    )
    echo "retrieval server: $server"
    set -- "env.options.url=${server##* }" "$@"
fi
exec .venv/bin/megastep train "$config" "$@"
