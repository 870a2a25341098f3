#!/usr/bin/env bash
# Submits `megastep train` to a running Ray cluster, follows its log, and ends as it ends.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

usage() {
    cat <<'USAGE'
usage: launch/ray_job.sh CONFIG [key=value ...]

Submits `megastep train CONFIG key=value ...` to a running Ray cluster and follows it to its end. Ctrl-C or SIGTERM
stops the job: it writes a checkpoint, and the same command goes on from there. So does the same command after a
failure, because the run has the name of CONFIG unless run.name=NAME is given here, or in a CONFIG that can be checked
here too. A lost connection or a closed terminal leave the job running; the same command then says which job that is.

The job runs in the project's folder, not in a copy: all nodes must have it at the same path, on a file system that
they share if there are several. CONFIG, run.dir and paths given as key=value are relative to that folder, paths in
CONFIG to where CONFIG is.

variables:
  RAY_API_SERVER_ADDRESS    where Ray's dashboard listens, such as http://HEAD:8265; or RAY_ADDRESS
  RAY_AUTH_MODE=token       where the cluster wants a token, which Ray looks up in ~/.ray/auth_token,
                            RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN
  RAY_JOB_STOP_WAIT_TIME_S  what a job that is stopped gets, before it is killed, to end its step and write a
                            checkpoint; default: 600
  MEGASTEP_ROOT             the project's folder on the nodes; default: the one of this script
  MEGASTEP_BIN              the folder of python and megastep on the nodes; default: .venv/bin of MEGASTEP_ROOT
  MEGASTEP_DRIVER_CPUS      CPUs to reserve for the loop and the environments, on any node; default: none, on the head
  CUDA_DEVICE_MAX_CONNECTIONS, GLOO_*, HF_*, NCCL_*, OMP_NUM_THREADS, PYTORCH_*, TORCH_*, WANDB_*
                            are passed on to all processes of the job. Whoever may look at the job can read them:
                            let the nodes have a WANDB_API_KEY of their own where that matters

exit code: 0 trained, 75 stopped (by others, or SIGTERM), 130 stopped by Ctrl-C, else that of `megastep train`;
2 also where CONFIG or the address is missing, 1 where the cluster cannot be reached or the job could not start
USAGE
}

say() { echo "ray_job: $*" >&2; }
refuse() {
    say "$*"
    exit 2
}

# The end of a process in the background, and its exit code, whatever signals come meanwhile.
await() {
    while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
    wait "$1"
}

case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
"" | -* | *=*) refuse "CONFIG is missing; usage: launch/ray_job.sh CONFIG [key=value ...]" ;;
esac
config="$1"
shift

address="${RAY_API_SERVER_ADDRESS:-${RAY_ADDRESS:-}}"
[[ -n "$address" ]] || refuse "set RAY_API_SERVER_ADDRESS to where Ray's dashboard listens, such as http://HEAD:8265"
[[ "$address" =~ ^https?:// ]] || refuse "$address: the dashboard's address is needed, such as http://HEAD:8265"
export RAY_API_SERVER_ADDRESS="$address"
unset RAY_ADDRESS

ray="$root/.venv/bin/ray" python="$root/.venv/bin/python"
[[ -x "$ray" ]] || refuse "$ray is missing: run launch/setup.sh, or install the extra gpu of pyproject.toml into .venv"
export MEGASTEP_ROOT="${MEGASTEP_ROOT:-$root}"
export MEGASTEP_BIN="${MEGASTEP_BIN:-$MEGASTEP_ROOT/.venv/bin}"
# Ray sends SIGTERM to the job's processes and SIGKILL after 3 seconds, unless the job's environment says otherwise.
export RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-600}"
# It would not be read before then, and the job not be killed in the end if this is no number.
[[ "$RAY_JOB_STOP_WAIT_TIME_S" =~ ^[0-9]+$ ]] ||
    refuse "RAY_JOB_STOP_WAIT_TIME_S = $RAY_JOB_STOP_WAIT_TIME_S: must be a whole number, of seconds"

name="$(basename "${config%.*}")" folder=runs
for given in "$@"; do
    case "$given" in
    run.name=*) name="${given#*=}" ;;
    run.dir=*) folder="${given#*=}" ;;
    esac
done
# CONFIG may say it too. If this machine does not have it, or not its model, only the nodes can tell.
folder_and_name() {
    cd "$MEGASTEP_ROOT" && "$python" - "$config" "$name" "$@" <<'PYTHON'
import sys
from megastep.config import load

config, name, *overrides = sys.argv[1:]
run = load(config, overrides, has_cuda=True).run
print(run.dir, run.name or name, sep="\n")
PYTHON
}
if said="$(folder_and_name "$@" 2>/dev/null)"; then { read -r folder && read -r name; } <<<"$said"; fi
[[ "$folder" == /* ]] || folder="$MEGASTEP_ROOT/$folder"

# ---------------------------------------------------------------- the job's name and environment

# Ray takes a submission id once, so the run's name gets a number: the first that is free. Two submissions at the same
# moment find the same one, and Ray refuses the second.
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
    sys.exit(f"ray_job: {address}: no Ray dashboard there ({str(error).splitlines()[0]})")
if theirs != ray.__version__:
    sys.exit(f"ray_job: {address}: the cluster has Ray {theirs}, this project {ray.__version__}; they must be the same")
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
    "working_dir": f"local://{os.environ['MEGASTEP_ROOT']}",  # as it is there: nothing is uploaded
    "py_executable": f"{os.environ['MEGASTEP_BIN']}/python",
    "env_vars": {key: value for key, value in os.environ.items() if key.startswith(passed_on)},
}))
PYTHON
)"
{ read -r job && read -r metadata && read -r runtime_env; } <<<"$described"

# ---------------------------------------------------------------- submitted, followed, stopped

# What talks to Ray is not ended by a signal to the whole group, such as Ctrl-C.
shielded() {
    trap '' INT TERM
    exec "$@"
}

asked="" stopped_by="" follower=""
stop() {
    stopped_by="$1"
    trap 'kill -HUP "$follower" 2>/dev/null; exit 130' INT TERM
    say "stopping job $job, in at most $RAY_JOB_STOP_WAIT_TIME_S s; a second signal does not wait for it"
    shielded "$ray" job stop --no-wait "$job" >/dev/null 2>&1 &
    await $! || say "job $job does not answer; it may go on running"
}

trap 'asked=INT' INT
trap 'asked=TERM' TERM
cpus=()
if [[ -n "${MEGASTEP_DRIVER_CPUS:-}" ]]; then cpus=(--entrypoint-num-cpus "$MEGASTEP_DRIVER_CPUS"); fi
shielded "$ray" job submit --no-wait --submission-id "$job" --metadata-json "$metadata" \
    --runtime-env-json "$runtime_env" "${cpus[@]}" -- \
    "$MEGASTEP_BIN/megastep" train "$config" run.name="$name" "$@" >/dev/null &
await $! || exit 1
say "job $job at $address; its run is $folder/$name"
trap 'stop INT' INT
trap 'stop TERM' TERM

# Not `ray job logs`: it says 0 of every job, and `ray job submit` 0 of one that was stopped and 1 of all that failed.
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
    print(f"ray_job: the log of job {job} is lost ({error}); waiting for its end", file=sys.stderr)
try:
    while not (info := client.get_job_info(job)).status.is_terminal():
        time.sleep(2)
except Exception as error:
    sys.exit(f"ray_job: the cluster does not answer ({str(error).splitlines()[0]}); job {job} may go on running")
print(f"ray_job: job {job}: {info.status}", file=sys.stderr)
if info.status == JobStatus.STOPPED:
    sys.exit(75)
if info.driver_exit_code is None:
    sys.exit(f"ray_job: {info.message}")
sys.exit(info.driver_exit_code if info.driver_exit_code >= 0 else 128 - info.driver_exit_code)
PYTHON
follower=$!
if [[ -n "$asked" ]]; then stop "$asked"; fi # before the job was there to be stopped
code=0
await "$follower" || code=$?
if ((code == 75)); then say "to go on from its last checkpoint, submit it again"; fi
if ((code == 75)) && [[ "$stopped_by" == INT ]]; then code=130; fi
exit "$code"
