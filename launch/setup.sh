#!/usr/bin/env bash
# Makes .venv for CPU from launch/requirements-cpu.txt; local.sh and test.sh call it first.
# Does nothing, at once, while the pins and pyproject.toml are those installed last.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
pins="$root/launch/requirements-cpu.txt"
log="$venv/install.log"
stamp="$venv/.installed"
unfinished="$venv/.unfinished"
cpu_index="https://download.pytorch.org/whl/cpu"

say() { echo "setup: $*" >&2; }

# The stamp holds the place too: a venv does not survive being moved.
digest="$(cat "$pins" "$root/pyproject.toml" | sha256sum)"
want="${digest%% *} $root"
installed() { [[ -x "$venv/bin/python" && -f "$stamp" && "$(<"$stamp")" == "$want" ]]; }
if installed; then exit 0; fi

# A second run waits here for the first, then finds the work done.
mkdir -p "$venv"
exec 9>>"$venv/.lock"
if ! flock --nonblock 9; then
    say "another run is installing; waiting for it"
    flock 9
fi
if installed; then exit 0; fi

# In the background, so that an interrupt need not wait for the command to end.
child=""
run() {
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    wait "$child"
}
stop() {
    if [[ -n "$child" ]]; then { kill "$child" && wait "$child"; } 2>/dev/null || true; fi
    say "interrupted; the next run starts afresh"
    exit 130
}
trap stop INT TERM HUP

fail() {
    grep -vE 'WARNING|already satisfied' "$log" | tail -n 8 | cut -c 1-200 >&2 || true
    say "$* (full log: $log)"
    exit 1
}

find_python() {
    local python
    for python in "${PYTHON:-}" python3.11 python3; do
        if "$python" -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    say "needs Python 3.11 with its venv module and found none (PYTHON can name one)"
    exit 2
}

# pip takes a half-written package for an installed one: what was interrupted is made anew.
if [[ ! -x "$venv/bin/python" || -e "$unfinished" ]] ||
    [[ -f "$stamp" && "$(<"$stamp")" != *" $root" ]]; then
    python="$(find_python)"
    say "installing into .venv: 3.8 GB, about three minutes, only this once"
    touch "$unfinished"
    find "$venv/" -mindepth 1 -maxdepth 1 ! -name .lock ! -name .unfinished -exec rm -rf {} +
    run "$python" -m venv "$venv" || fail "cannot create .venv with $python"
else
    say "bringing .venv up to date"
    rm -f "$stamp" "$log"
fi

# Inside .venv, what an interrupted pip leaves behind goes with the rest.
export TMPDIR="$venv/tmp"
mkdir -p "$TMPDIR"
pip_install() {
    touch "$unfinished"
    if ! run "$venv/bin/python" -m pip install --no-deps --no-input --progress-bar off \
        --disable-pip-version-check "$@"; then
        # An unknown version or a lost network stops pip before it writes: keep what is there.
        grep -q "^Installing collected packages" "$log" || rm "$unfinished"
        return 1
    fi
}

# torch first and by its full version: a plain 2.13.0 could be met by several GB of CUDA.
torch="$(grep '^torch==' "$pins")"
say "1/3 $torch"
if ! pip_install "$torch"; then
    grep -q "No matching distribution found for torch" "$log" || fail "cannot install $torch"
    say "    not in pip's own indexes, trying $cpu_index"
    pip_install --extra-index-url "$cpu_index" "$torch" ||
        fail "found no $torch, neither in pip's own indexes nor at $cpu_index"
fi
say "2/3 vLLM, Megatron-Core, Ray and what they need"
hashed="$TMPDIR/hashed.txt"
grep -v '^torch==' "$pins" >"$hashed"
pip_install --require-hashes -r "$hashed" || fail "cannot install launch/requirements-cpu.txt"
say "3/3 megastep"
pip_install --no-build-isolation -e "$root" || fail "cannot install megastep itself"

rm -rf "$TMPDIR"
echo "$want" >"$stamp"
rm "$unfinished"
say "done in $SECONDS s"
