#!/usr/bin/env bash
# Ray on one node of the job of slurm.sbatch: the head on the first, which the others join.
#
# SIGURG ends it, which means nothing to Ray itself: some Slurms send a signal to every process of a step, others to its
# tasks only. SIGTERM is what Slurm sends to all steps before it preempts or cancels a job. That is for training, which
# needs Ray for its checkpoint; it is noted, in case Ray has got it too and ends.
set -uo pipefail

asked="" terminated="" ray=""
trap 'asked=yes' URG
trap 'terminated=yes; echo yes >"$MEGASTEP_LOGS/terminated"' TERM

# A job may be killed before it can clean up. Folders that nobody holds a lock on are of such jobs.
for old in /tmp/megastep-[0-9]*-[0-9]*/; do
    if [[ -O "$old" && "$old" != "/tmp/megastep-$SLURM_JOB_ID-"* ]]; then flock --nonblock "$old" rm -rf "$old"; fi
done

# Ray's sockets live in this folder, and their paths must be short. Two nodes may be one machine: each has its own.
folder="/tmp/megastep-$SLURM_JOB_ID-$SLURM_NODEID"
rm -rf "$folder" # of the time before, if this job was requeued
mkdir -m 700 "$folder" || exit 1
exec 9<"$folder" && flock 9

options=(
    --block --log-color=false --disable-usage-stats --include-log-monitor=false
    --temp-dir="$folder" --node-name="$SLURMD_NODENAME"
    --dashboard-agent-listen-port=0 # any; two nodes on one machine would want the same
)
# What Slurm gave to the job, where it says so; Ray itself would count all that the machine has.
if [[ -n "${SLURM_CPUS_ON_NODE:-}" ]]; then options+=(--num-cpus="$SLURM_CPUS_ON_NODE"); fi
if [[ -n "${SLURM_GPUS_ON_NODE:-}" ]]; then options+=(--num-gpus="$SLURM_GPUS_ON_NODE"); fi

head="${RAY_ADDRESS%:*}" port="${RAY_ADDRESS##*:}"
unset RAY_ADDRESS
if ((SLURM_NODEID == 0)); then
    options+=(--head --node-ip-address="$head" --port="$port" --ray-client-server-port="$MEGASTEP_CLIENT_PORT"
        --include-dashboard=false)
else
    options+=(--address="$head:$port")
    # Ray gives up after 20 seconds, and a container may take longer on one node than on another.
    while [[ -z "$asked" ]] && ! (: <"/dev/tcp/$head/$port") 2>/dev/null; do sleep 1; done
fi

code=0
if [[ -z "$asked" ]]; then
    ray start "${options[@]}" 9<&- &
    ray=$!
    while [[ -z "$asked" ]] && kill -0 "$ray" 2>/dev/null; do wait "$ray"; done # a signal ends `wait` too
fi
if [[ -n "$asked" ]]; then
    # Slurm may have sent SIGTERM to Ray too. If that came while Ray started, it tries for long to reach its parts,
    # which have ended.
    for _ in {1..10}; do
        kill -TERM "$ray" 2>/dev/null || break
        sleep 1
    done
    kill -KILL "$ray" 2>/dev/null
elif [[ -z "$terminated" ]]; then
    wait "$ray" || code=$?
    echo "$SLURMD_NODENAME" >>"$MEGASTEP_LOGS/lost"
    echo "Ray ended by itself, with exit code $code; the last it said:"
    tail -n 20 "$folder"/session_latest/logs/{gcs_server,raylet}.{out,err} 2>/dev/null
    ((code)) || code=1
fi
rm -rf "$folder"
exit "$code"
