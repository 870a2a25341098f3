#!/usr/bin/env bash
# Installs launch/requirements-cpu.txt into .venv; local.sh and test.sh call it first.
# Returns at once while the pins and pyproject.toml are those of the last installation.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
pins="$root/launch/requirements-cpu.txt"
install_log="$venv/install.log"
stamp="$venv/.installed"
unfinished="$venv/.unfinished"
cpu_index="https://download.pytorch.org/whl/cpu"

log() { echo "setup: $*" >&2; }

# The stamp includes the path: a venv cannot be moved.
digest="$(cat "$pins" "$root/pyproject.toml" | sha256sum)"
want="${digest%% *} $root"
installed() { [[ -x "$venv/bin/python" && -f "$stamp" && "$(<"$stamp")" == "$want" ]]; }
if installed; then exit 0; fi
# An environment of setup-gpu.sh also serves local.sh and test.sh.
if [[ -x "$venv/bin/python" && -f "$venv/.installed-gpu" ]]; then exit 0; fi

# A second process waits here for the first.
mkdir -p "$venv"
exec 9>>"$venv/.lock"
if ! flock --nonblock 9; then
    log "another process is installing; waiting"
    flock 9
fi
if installed; then exit 0; fi

# In the background, so that signals are handled at once.
child=""
run() {
    "$@" >>"$install_log" 2>&1 </dev/null &
    child=$!
    wait "$child"
}
stop() {
    if [[ -n "$child" ]]; then { kill "$child" && wait "$child"; } 2>/dev/null || true; fi
    log "interrupted; the next run reinstalls"
    exit 130
}
trap stop INT TERM HUP

fail() {
    grep -vE 'WARNING|already satisfied' "$install_log" | tail -n 8 | cut -c 1-200 >&2 || true
    log "$* (full log: $install_log)"
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
    log "Python 3.11 with the venv module is required and was not found (set PYTHON to its path)"
    exit 2
}

# pip takes a partly written package for an installed one: reinstall after an interrupt.
if [[ ! -x "$venv/bin/python" || -e "$unfinished" ]] ||
    [[ -f "$stamp" && "$(<"$stamp")" != *" $root" ]]; then
    python="$(find_python)"
    log "installing into .venv: 3.8 GB, about three minutes, once"
    touch "$unfinished"
    find "$venv/" -mindepth 1 -maxdepth 1 ! -name .lock ! -name .unfinished -exec rm -rf {} +
    run "$python" -m venv "$venv" || fail "cannot create .venv with $python"
else
    log "updating .venv"
    rm -f "$stamp" "$install_log"
fi

# Inside .venv, temporary files of an interrupted pip are removed with it.
export TMPDIR="$venv/tmp"
mkdir -p "$TMPDIR"
pip_install() {
    touch "$unfinished"
    if ! run "$venv/bin/python" -m pip install --no-deps --no-input --progress-bar off \
        --disable-pip-version-check "$@"; then
        # An unknown version or a network failure stops pip before it writes: keep .venv.
        grep -q "^Installing collected packages" "$install_log" || rm "$unfinished"
        return 1
    fi
}

# torch first and by its full version: plain 2.13.0 also matches several GB of CUDA.
torch="$(grep '^torch==' "$pins")"
log "1/3 $torch"
if ! pip_install "$torch"; then
    grep -q "No matching distribution found for torch" "$install_log" || fail "cannot install $torch"
    log "    not in pip's indexes, trying $cpu_index"
    pip_install --extra-index-url "$cpu_index" "$torch" ||
        fail "found no $torch, neither in pip's indexes nor at $cpu_index"
fi
log "2/3 vLLM, Megatron-Core, Ray and dependencies"
hashed="$TMPDIR/hashed.txt"
grep -v '^torch==' "$pins" >"$hashed"
pip_install --require-hashes -r "$hashed" || fail "cannot install launch/requirements-cpu.txt"
log "3/3 megastep"
pip_install --no-build-isolation -e "$root" || fail "cannot install megastep itself"

rm -rf "$TMPDIR"
echo "$want" >"$stamp"
rm "$unfinished"
log "done in $SECONDS s"
