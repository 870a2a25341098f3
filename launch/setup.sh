#!/usr/bin/env bash
# Installs launch/requirements-cpu.txt into .venv; local.sh and test.sh call it first.
# Returns at once while the pins and pyproject.toml are those of the last installation.
#
#   PYTHON   the interpreter (3.11, 3.12 or 3.13); default: the first of python3.11, python3.12, python3.13, python3
#   VENV     the folder; default: .venv
#
# Megatron-Core is 0.16.1 on Python 3.11, 0.19.2 on 3.12 and 3.13. To change the Python, remove .venv.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="${VENV:-$root/.venv}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"
pins="$root/launch/requirements-cpu.txt"
te_pin="$root/launch/requirements-te.txt"
install_log="$venv/install.log"
stamp="$venv/.installed"
unfinished="$venv/.unfinished"
cpu_index="https://download.pytorch.org/whl/cpu"

log() { echo "setup: $*" >&2; }

# The stamp includes the path: a venv cannot be moved.
digest="$(cat "$pins" "$te_pin" "$root/pyproject.toml" | sha256sum)"
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

supported() {
    "$1" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}
find_python() {
    local python
    if [[ -n "${PYTHON:-}" ]]; then
        if supported "$PYTHON"; then echo "$PYTHON" && return; fi
        log "PYTHON=$PYTHON is not Python 3.11, 3.12 or 3.13 with the venv module"
        exit 2
    fi
    for python in python3.11 python3.12 python3.13 python3; do
        if supported "$python"; then echo "$python" && return; fi
    done
    log "Python 3.11, 3.12 or 3.13 with the venv module is required and was not found (set PYTHON to its path)"
    exit 2
}

# pip takes a partly written package for an installed one: reinstall after an interrupt.
if [[ ! -x "$venv/bin/python" || -e "$unfinished" ]] ||
    [[ -f "$stamp" && "$(<"$stamp")" != *" $root" ]]; then
    python="$(find_python)"
    log "installing into ${venv##*/} with $python: 3.8 GB, about three minutes, once"
    touch "$unfinished"
    find "$venv/" -mindepth 1 -maxdepth 1 ! -name .lock ! -name .unfinished -exec rm -rf {} +
    run "$python" -m venv "$venv" || fail "cannot create $venv with $python"
else
    log "updating ${venv##*/}"
    rm -f "$stamp" "$install_log"
fi

# Inside .venv, temporary files of an interrupted pip are removed with it.
export TMPDIR="$venv/tmp"
mkdir -p "$TMPDIR"
pip_install() {
    touch "$unfinished"
    if ! run "$venv/bin/python" -m pip install --no-input --progress-bar off \
        --disable-pip-version-check "$@"; then
        # An unknown version or a network failure stops pip before it writes: keep .venv.
        grep -q "^Installing collected packages" "$install_log" || rm "$unfinished"
        return 1
    fi
}

# torch first and by its full version: plain 2.13.0 also matches several GB of CUDA.
torch="$(grep '^torch==' "$pins")"
log "1/4 $torch"
if ! pip_install --no-deps "$torch"; then
    grep -q "No matching distribution found for torch" "$install_log" || fail "cannot install $torch"
    log "    not in pip's indexes, trying $cpu_index"
    if ! pip_install --no-deps --extra-index-url "$cpu_index" "$torch"; then
        # It runs on a CPU too; the CUDA libraries that it loads are dependencies.
        log "    not there either, trying the CUDA build: 4 GB more"
        pip_install "${torch%+cpu}" || fail "found no $torch and no CUDA build"
    fi
fi
log "2/4 vLLM, Megatron-Core, Ray and dependencies"
hashed="$TMPDIR/hashed.txt"
grep -v '^torch==' "$pins" >"$hashed"
pip_install --no-deps --require-hashes -r "$hashed" || fail "cannot install launch/requirements-cpu.txt"
log "3/4 Transformer Engine's Python layers, for tests"
run "$venv/bin/python" -m pip download --no-deps --no-input --progress-bar off \
    --disable-pip-version-check --require-hashes --dest "$venv/wheels" -r "$te_pin" ||
    fail "cannot fetch launch/requirements-te.txt"
log "4/4 megastep"
pip_install --no-deps --no-build-isolation -e "$root" || fail "cannot install megastep itself"

rm -rf "$TMPDIR"
echo "$want" >"$stamp"
rm "$unfinished"
log "done in $SECONDS s"
