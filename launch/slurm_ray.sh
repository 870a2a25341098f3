#!/usr/bin/env bash
# Ray on one node of the job of slurm.sbatch: the head on the first, which the others join.
#
# SIGURG ends it, which Ray itself ignores: some Slurm versions signal every process of a step, others its tasks only.
# SIGTERM, which Slurm sends to all steps before it preempts or cancels a job, is for training, which needs Ray for its
# checkpoint; it is recorded, in case Ray received it too and ends.
set -uo pipefail

asked="" terminated="" ray=""
trap 'asked=yes' URG
trap 'terminated=yes; echo yes >"$MEGASTEP_LOGS/terminated"' TERM

# Folders without a lock belong to jobs that were killed before they could clean up.
for old in /tmp/megastep-[0-9]*-[0-9]*/; do
    if [[ -O "$old" && "$old" != "/tmp/megastep-$SLURM_JOB_ID-"* ]]; then flock --nonblock "$old" rm -rf "$old"; fi
done

# The paths of Ray's sockets must be short. Two nodes may be one machine, so the folder is per node.
folder="/tmp/megastep-$SLURM_JOB_ID-$SLURM_NODEID"
rm -rf "$folder" # of an earlier run of this job, if it was requeued
mkdir -m 700 "$folder" || exit 1
exec 9<"$folder" && flock 9

options=(
    --block --log-color=false --disable-usage-stats --include-log-monitor=false
    --temp-dir="$folder" --node-name="$SLURMD_NODENAME"
    --dashboard-agent-listen-port=0 # any free port: two nodes may share a machine
)
# The resources that Slurm gave to the job; Ray would count all of the machine.
if [[ -n "${SLURM_CPUS_ON_NODE:-}" ]]; then options+=(--num-cpus="$SLURM_CPUS_ON_NODE"); fi
if [[ -n "${SLURM_GPUS_ON_NODE:-}" ]]; then options+=(--num-gpus="$SLURM_GPUS_ON_NODE"); fi

head="${RAY_ADDRESS%:*}" port="${RAY_ADDRESS##*:}"
unset RAY_ADDRESS
if ((SLURM_NODEID == 0)); then
    options+=(--head --node-ip-address="$head" --port="$port" --ray-client-server-port="$MEGASTEP_CLIENT_PORT"
        --include-dashboard=false)
else
    options+=(--address="$head:$port")
    # Ray stops trying after 20 seconds; containers may take longer on one node than on another.
    while [[ -z "$asked" ]] && ! (: <"/dev/tcp/$head/$port") 2>/dev/null; do sleep 1; done
fi

# Ray that ends at once would do so again; the others cannot continue without the head.
may_join_again() { ((SLURM_NODEID > 0 && SECONDS - begun >= 10)) && (: <"/dev/tcp/$head/$port") 2>/dev/null; }

code=0
while [[ -z "$asked" ]]; do
    begun=$SECONDS
    ray start "${options[@]}" 9<&- &
    ray=$!
    while [[ -z "$asked" ]] && kill -0 "$ray" 2>/dev/null; do wait "$ray"; done # a signal interrupts `wait`
    [[ -z "$asked$terminated" ]] || break
    wait "$ray" || code=$?
    echo "Ray ended by itself, with exit code $code; its last output:"
    tail -n 20 "$folder"/session_latest/logs/{gcs_server,raylet}.{out,err} 2>/dev/null
    if ! may_join_again; then
        echo "$SLURMD_NODENAME" >>"$MEGASTEP_LOGS/lost"
        ((code)) || code=1
        break
    fi
    echo "Ray starts again"
    code=0
    rm -rf "${folder:?}"/*
done
if [[ -n "$asked" && -n "$ray" ]]; then
    # Slurm may have sent SIGTERM to Ray too. During Ray's start that makes it wait for long for processes that have
    # ended.
    for _ in {1..10}; do
        kill -TERM "$ray" 2>/dev/null || break
        sleep 1
    done
    kill -KILL "$ray" 2>/dev/null
fi
rm -rf "$folder"
exit "$code"
