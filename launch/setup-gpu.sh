#!/usr/bin/env bash
# Installs the extra `gpu` of pyproject.toml into .venv, on a node with NVIDIA GPUs. Not run on one yet.
# Returns at once while pyproject.toml and the options are those of the last installation.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
install_log="$venv/install.log"
stamp="$venv/.installed-gpu"
unfinished="$venv/.unfinished"
apex="git+https://github.com/NVIDIA/apex@6424da3b4faa6c8f062da4a48c424fff3f02d42d"
# The last release with `deep_ep.Buffer`, which Megatron-Core 0.16 imports.
deep_ep="git+https://github.com/deepseek-ai/DeepEP@v1.2.1"

usage() {
    cat <<'USAGE'
usage: launch/setup-gpu.sh [--apex] [--deep-ep] [--dry-run]

Installs into .venv: torch, build packages, Transformer Engine, then megastep with Megatron-Core, vLLM and Ray; checks
the imports and ends with `megastep doctor`. Transformer Engine is compiled against torch, which takes several minutes,
an hour on one core. Needs a C++ compiler and nvcc of torch's CUDA version; no GPU.

  --apex      also NVIDIA's apex, compiled from its repository: fused gradient accumulation
  --deep-ep   also DeepEP, compiled from its repository: expert parallelism over NVLink and RDMA
  --dry-run   print the commands only

variables:
  PYTHON      the Python to use; default: the first of python3.11, python3.12, python3.13 and python3 that is supported
  CUDA_HOME   the CUDA toolkit; default: that of nvcc in PATH, else /usr/local/cuda
  MAX_JOBS    compilers at once; default: one per core, at most 16. Each may take several GB

exit code: 0 installed, also if `megastep doctor` finds a problem of the machine; 1 failed; 2 something is missing
USAGE
}

log() { echo "setup-gpu: $*" >&2; }

with_apex="" with_deep_ep="" dry_run=""
for option in "$@"; do
    case "$option" in
    -h | --help) usage && exit 0 ;;
    --apex) with_apex=yes ;;
    --deep-ep) with_deep_ep=yes ;;
    --dry-run) dry_run=yes ;;
    *)
        log "unknown option $option"
        usage >&2
        exit 2
        ;;
    esac
done

# ---------------------------------------------------------------- before anything is written

is_supported() {
    "$1" - "$root/pyproject.toml" 2>/dev/null <<'PYTHON'
import ensurepip, re, sys, tomllib

with open(sys.argv[1], "rb") as file:
    bounds = re.findall(r"(>=|<)([\d.]+)", tomllib.load(file)["project"]["requires-python"])
for sign, text in bounds:
    bound = tuple(map(int, text.split(".")))
    if (sys.version_info[:2] < bound) if sign == ">=" else (sys.version_info[:2] >= bound):
        sys.exit(1)
PYTHON
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [[ -n "$candidate" ]] && is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    log "no Python with the venv module as pyproject.toml requires it (set PYTHON to its path)"
    exit 2
}

# The requirement of the extra `gpu`, such as torch==2.13.0.
requirement() {
    "$python" - "$root/pyproject.toml" "$1" <<'PYTHON'
import re, sys, tomllib

with open(sys.argv[1], "rb") as file:
    extra = tomllib.load(file)["project"]["optional-dependencies"]["gpu"]
print(next(line for line in extra if re.split(r"[\[=<>~; ]", line)[0] == sys.argv[2]))
PYTHON
}

python="$(find_python)"
torch="$(requirement torch)"
transformer_engine="$(requirement transformer-engine)"
packages="$venv/lib/python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages"

if [[ -z "${CUDA_HOME:-}" ]]; then
    nvcc="$(command -v nvcc || true)"
    if [[ -n "$nvcc" ]]; then
        CUDA_HOME="$(dirname "$(dirname "$(readlink -f "$nvcc")")")"
    else
        CUDA_HOME=/usr/local/cuda
    fi
fi
export CUDA_HOME
if [[ -z "${MAX_JOBS:-}" ]]; then
    MAX_JOBS="$(nproc)"
    if ((MAX_JOBS > 16)); then MAX_JOBS=16; fi
fi
export MAX_JOBS

if [[ -z "$dry_run" ]]; then
    if [[ ! -x "$CUDA_HOME/bin/nvcc" ]]; then
        log "no nvcc in $CUDA_HOME/bin: Transformer Engine is compiled. Install the CUDA toolkit, or set CUDA_HOME"
        exit 2
    fi
    if ! command -v "${CXX:-c++}" >/dev/null; then
        log "no C++ compiler: install g++, or set CXX"
        exit 2
    fi
    if [[ -n "$with_apex$with_deep_ep" ]] && ! command -v git >/dev/null; then
        log "no git: --apex and --deep-ep need it"
        exit 2
    fi
fi

# ---------------------------------------------------------------- lock and stamp, as in setup.sh

# The stamp includes the path: a venv cannot be moved.
digest="$(cat "$root/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum)"
want="${digest%% *} apex=$with_apex deep_ep=$with_deep_ep $root"
installed() { [[ -x "$venv/bin/python" && -f "$stamp" && "$(<"$stamp")" == "$want" ]]; }

if [[ -z "$dry_run" ]]; then
    if installed; then exit 0; fi
    # A second process waits here for the first.
    mkdir -p "$venv"
    exec 9>>"$venv/.lock"
    if ! flock --nonblock 9; then
        log "another process is installing; waiting"
        flock 9
    fi
    if installed; then exit 0; fi
fi

# In the background, so that signals are handled at once.
child=""
run() {
    if [[ -n "$dry_run" ]]; then
        printf '%q ' "$@"
        echo
        return
    fi
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
    grep -vE 'WARNING|already satisfied' "$install_log" | tail -n 12 | cut -c 1-200 >&2 || true
    log "$* (full log: $install_log)"
    exit 1
}

pip_install() {
    run "$venv/bin/python" -m pip install --no-input --progress-bar off --disable-pip-version-check "$@"
}

# Compilers find the headers of torch's CUDA packages here; the toolkit lacks those of cuDNN and NCCL.
headers="$packages/nvidia/cu13/include:$packages/nvidia/cudnn/include:$packages/nvidia/nccl/include"
compile() { # VARIABLE=value ... REQUIREMENT
    local requirement="${*: -1}"
    run env "CPATH=$headers${CPATH:+:$CPATH}" "CUDA_HOME=$CUDA_HOME" "MAX_JOBS=$MAX_JOBS" "${@:1:$#-1}" \
        "$venv/bin/python" -m pip install --no-input --progress-bar off --disable-pip-version-check \
        --no-build-isolation "$requirement"
}

# ---------------------------------------------------------------- installation

# pip takes a partly written package for an installed one: without a stamp everything is installed again, also over the
# packages of setup.sh, which are those of a CPU. `unfinished` is for setup.sh, which must not update what is left here.
if [[ -z "$dry_run" ]]; then
    if [[ ! -x "$venv/bin/python" || ! -f "$stamp" || "$(<"$stamp")" != *" $root" ]]; then
        log "installing into .venv with $python: 15 GB"
        touch "$unfinished"
        find "$venv/" -mindepth 1 -maxdepth 1 ! -name .lock ! -name .unfinished -exec rm -rf {} +
        run "$python" -m venv "$venv" || fail "cannot create .venv with $python"
    else
        log "updating .venv"
        touch "$unfinished"
        rm -f "$stamp" "$install_log"
    fi
    # Inside .venv, temporary files of an interrupted pip are removed with it.
    export TMPDIR="$venv/tmp"
    mkdir -p "$TMPDIR"
else
    run "$python" -m venv "$venv"
fi

# pip first: uv resolves Transformer Engine's packages for CUDA 12 and 13 at once, which overwrite each other.
log "1/4 $torch"
pip_install "$torch" || fail "cannot install $torch"
if [[ -z "$dry_run" ]]; then
    cuda="$("$venv/bin/python" -W ignore -c 'import torch; print(torch.version.cuda or "")')"
    if [[ -z "$cuda" ]]; then
        log "pip has installed a CPU build as $torch: its indexes (pip config list, PIP_INDEX_URL) must offer a CUDA build"
        exit 2
    fi
    toolkit="$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
    if [[ "${cuda%%.*}" != "${toolkit%%.*}" ]]; then
        log "torch is built for CUDA $cuda, $CUDA_HOME has CUDA $toolkit: set CUDA_HOME to a toolkit of CUDA ${cuda%%.*}"
        exit 2
    fi
fi
log "2/4 build packages"
pip_install 'setuptools>=77' wheel packaging ninja pybind11 || fail "cannot install the build packages"
log "3/4 $transformer_engine: compiled with $MAX_JOBS job(s)"
compile NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE "$transformer_engine" ||
    fail "cannot compile Transformer Engine"
log "4/4 megastep, Megatron-Core, vLLM, Ray and dependencies"
pip_install --no-build-isolation -e "${root}[gpu,dev]" || fail "cannot install megastep and its dependencies"
if [[ -n "$with_apex" ]]; then
    log "apex: compiled with $MAX_JOBS job(s)"
    compile APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "$apex" || fail "cannot compile apex"
fi
if [[ -n "$with_deep_ep" ]]; then
    log "DeepEP: compiled with $MAX_JOBS job(s)"
    compile "NVSHMEM_DIR=${NVSHMEM_DIR:-$packages/nvidia/nvshmem}" "$deep_ep" || fail "cannot compile DeepEP"
fi

# ---------------------------------------------------------------- checks

modules=(torch megatron.core vllm ray)
# Their libraries need that of the driver, which a machine for building may lack.
if [[ -n "$dry_run" ]] || nvidia-smi -L >/dev/null 2>&1; then
    modules+=(transformer_engine.pytorch)
    if [[ -n "$with_apex" ]]; then modules+=(amp_C fused_weight_gradient_mlp_cuda); fi
    if [[ -n "$with_deep_ep" ]]; then modules+=(deep_ep); fi
else
    log "no GPU here: Transformer Engine is not imported"
fi
for module in "${modules[@]}"; do
    # torch first: it loads the libraries of the others.
    run "$venv/bin/python" -c "import torch, $module" || fail "$module was installed and cannot be imported"
done
if [[ -n "$dry_run" ]]; then
    run "$venv/bin/megastep" doctor
    exit 0
fi
rm -rf "$TMPDIR"
echo "$want" >"$stamp"
rm -f "$unfinished"
log "done in $SECONDS s"
"$venv/bin/megastep" doctor || log "installed; megastep doctor has found a problem of this machine"
