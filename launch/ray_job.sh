#!/usr/bin/env bash
# Submits `megastep train` to a running Ray cluster, follows its log, and returns its exit code.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

usage() {
    cat <<'USAGE'
usage: launch/ray_job.sh CONFIG [key=value ...]

Submits `megastep train CONFIG key=value ...` to a running Ray cluster and follows it to its end. Ctrl-C or SIGTERM
stops the job with a checkpoint; the same command continues from it, also after a failure: the run has the name of
CONFIG unless run.name=NAME is given here, or in a CONFIG that this machine can read. After a lost connection or a
closed terminal the job continues; the same command then prints its id.

The job runs in the project's folder, not in a copy: all nodes need it at the same path, on a shared file system if
there are several. CONFIG, run.dir and paths given as key=value are relative to that folder, paths in CONFIG to the
folder of CONFIG.

variables:
  RAY_API_SERVER_ADDRESS    address of Ray's dashboard, such as http://HEAD:8265; or RAY_ADDRESS
  RAY_AUTH_MODE=token       if the cluster requires a token, which Ray reads from ~/.ray/auth_token,
                            RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN
  RAY_JOB_STOP_WAIT_TIME_S  seconds for a stopped job to finish its training step and write a checkpoint before it
                            is killed; default: 600
  MEGASTEP_ROOT             the project's folder on the nodes; default: that of this script
  MEGASTEP_BIN              the folder of python and megastep on the nodes; default: .venv/bin of MEGASTEP_ROOT
  MEGASTEP_DRIVER_CPUS      CPUs to reserve for the loop and the environments, on any node; default: none, on the head
  CUDA_DEVICE_MAX_CONNECTIONS, GLOO_*, HF_*, NCCL_*, OMP_NUM_THREADS, PYTORCH_*, TORCH_*, WANDB_*
                            are passed to all processes of the job. Everyone with access to the job can read them:
                            set WANDB_API_KEY on the nodes instead if that matters

exit code: 0 trained, 75 stopped (by SIGTERM or `ray job stop`), 130 stopped by Ctrl-C, else that of `megastep train`;
also 2 if CONFIG or the address is missing, 1 if the cluster cannot be reached or the job could not start
USAGE
}

log() { echo "ray_job: $*" >&2; }
usage_error() {
    log "$*"
    exit 2
}

# Wait for a background process and return its exit code, regardless of signals.
await() {
    while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
    wait "$1"
}

case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
"" | -* | *=*) usage_error "CONFIG is missing; usage: launch/ray_job.sh CONFIG [key=value ...]" ;;
esac
config="$1"
shift

address="${RAY_API_SERVER_ADDRESS:-${RAY_ADDRESS:-}}"
[[ -n "$address" ]] || usage_error "set RAY_API_SERVER_ADDRESS to the address of Ray's dashboard, such as http://HEAD:8265"
[[ "$address" =~ ^https?:// ]] || usage_error "$address: the dashboard's address is needed, such as http://HEAD:8265"
export RAY_API_SERVER_ADDRESS="$address"
unset RAY_ADDRESS

ray="$root/.venv/bin/ray" python="$root/.venv/bin/python"
[[ -x "$ray" ]] || usage_error "$ray is missing: run launch/setup.sh, or launch/setup-gpu.sh on a GPU node"
export MEGASTEP_ROOT="${MEGASTEP_ROOT:-$root}"
export MEGASTEP_BIN="${MEGASTEP_BIN:-$MEGASTEP_ROOT/.venv/bin}"
# Ray sends SIGTERM to the job's processes and SIGKILL after 3 seconds, unless the job's environment sets this.
export RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-600}"
# Ray reads it only when the job is stopped, and never kills the job if it is not a number.
[[ "$RAY_JOB_STOP_WAIT_TIME_S" =~ ^[0-9]+$ ]] ||
    usage_error "RAY_JOB_STOP_WAIT_TIME_S = $RAY_JOB_STOP_WAIT_TIME_S: must be a whole number of seconds"

name="$(basename "${config%.*}")" folder=runs
for given in "$@"; do
    case "$given" in
    run.name=*) name="${given#*=}" ;;
    run.dir=*) folder="${given#*=}" ;;
    esac
done
# CONFIG may set both. If this machine lacks CONFIG or its model, the nodes decide.
folder_and_name() {
    cd "$MEGASTEP_ROOT" && "$python" - "$config" "$name" "$@" <<'PYTHON'
import sys
from megastep.config import load

config, name, *overrides = sys.argv[1:]
run = load(config, overrides, has_cuda=True).run
print(run.dir, run.name or name, sep="\n")
PYTHON
}
if found="$(folder_and_name "$@" 2>/dev/null)"; then { read -r folder && read -r name; } <<<"$found"; fi
[[ "$folder" == /* ]] || folder="$MEGASTEP_ROOT/$folder"

# ---------------------------------------------------------------- the job's name and environment

# Submission ids are unique, so the run's name gets the first free number. Of two simultaneous submissions Ray rejects
# the second.
described="$("$python" - "$folder/$name" <<'PYTHON'
import itertools, json, os, sys
import ray
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

run, address = sys.argv[1], os.environ["RAY_API_SERVER_ADDRESS"]
try:
    client = JobSubmissionClient()
    theirs = client._do_request("GET", "/api/version").json()["ray_version"]
    jobs = client.list_jobs()
except AuthenticationError as error:
    sys.exit(f"ray_job: {address}: {str(error).splitlines()[0]}; see RAY_AUTH_MODE in launch/ray_job.sh --help")
except Exception as error:
    sys.exit(f"ray_job: {address}: no Ray dashboard at this address ({str(error).splitlines()[0]})")
if theirs != ray.__version__:
    sys.exit(f"ray_job: {address}: the cluster has Ray {theirs}, this project {ray.__version__}; they must be equal")
for job in jobs:
    if (job.metadata or {}).get("run") == run and not job.status.is_terminal():
        sys.exit(f"ray_job: {run} is being trained by job {job.submission_id}; to see it: .venv/bin/ray job logs "
                 f"--follow {job.submission_id}; to end it: .venv/bin/ray job stop {job.submission_id}")

used = {job.submission_id for job in jobs}
passed_on = ("CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_", "HF_", "NCCL_", "OMP_NUM_THREADS", "PYTORCH_", "TORCH_", "WANDB_",
             "RAY_JOB_STOP_WAIT_TIME_S")
print(next(job for n in itertools.count(1) if (job := f"{os.path.basename(run)}-{n}") not in used))
print(json.dumps({"run": run}))
print(json.dumps({
    "working_dir": f"local://{os.environ['MEGASTEP_ROOT']}",  # a folder of the nodes: nothing is uploaded
    "py_executable": f"{os.environ['MEGASTEP_BIN']}/python",
    "env_vars": {key: value for key, value in os.environ.items() if key.startswith(passed_on)},
}))
PYTHON
)"
{ read -r job && read -r metadata && read -r runtime_env; } <<<"$described"

# ---------------------------------------------------------------- submit, follow, stop

# Clients of Ray survive a signal to the whole process group, such as Ctrl-C.
shielded() {
    trap '' INT TERM
    exec "$@"
}

asked="" stopped_by="" follower=""
stop() {
    stopped_by="$1"
    trap 'kill -HUP "$follower" 2>/dev/null; exit 130' INT TERM
    log "stopping job $job, in at most $RAY_JOB_STOP_WAIT_TIME_S s; a second signal returns at once"
    shielded "$ray" job stop --no-wait "$job" >/dev/null 2>&1 &
    await $! || log "job $job does not answer; it may still be running"
}

trap 'asked=INT' INT
trap 'asked=TERM' TERM
cpus=()
if [[ -n "${MEGASTEP_DRIVER_CPUS:-}" ]]; then cpus=(--entrypoint-num-cpus "$MEGASTEP_DRIVER_CPUS"); fi
shielded "$ray" job submit --no-wait --submission-id "$job" --metadata-json "$metadata" \
    --runtime-env-json "$runtime_env" "${cpus[@]}" -- \
    "$MEGASTEP_BIN/megastep" train "$config" run.name="$name" "$@" >/dev/null &
await $! || exit 1
log "job $job at $address; its run is $folder/$name"
trap 'stop INT' INT
trap 'stop TERM' TERM

# Not `ray job logs`, which returns 0 for every job, nor `ray job submit`, which returns 0 for a stopped job and 1 for
# every failed one.
shielded "$python" - "$job" <<'PYTHON' &
import asyncio, logging, sys, time
from ray.job_submission import JobStatus, JobSubmissionClient

job, client = sys.argv[1], JobSubmissionClient()
logging.disable(logging.INFO)


async def follow():
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


try:
    asyncio.run(follow())
except Exception as error:
    print(f"ray_job: lost the log of job {job} ({error}); waiting for its end", file=sys.stderr)
try:
    while not (info := client.get_job_info(job)).status.is_terminal():
        time.sleep(2)
except Exception as error:
    sys.exit(f"ray_job: the cluster does not answer ({str(error).splitlines()[0]}); job {job} may still be running")
print(f"ray_job: job {job}: {info.status}", file=sys.stderr)
if info.status == JobStatus.STOPPED:
    sys.exit(75)
if info.driver_exit_code is None:
    sys.exit(f"ray_job: {info.message}")
sys.exit(info.driver_exit_code if info.driver_exit_code >= 0 else 128 - info.driver_exit_code)
PYTHON
follower=$!
if [[ -n "$asked" ]]; then stop "$asked"; fi # signalled before the job existed
code=0
await "$follower" || code=$?
if ((code == 75)); then log "to continue from its last checkpoint, submit it again"; fi
if ((code == 75)) && [[ "$stopped_by" == INT ]]; then code=130; fi
exit "$code"
