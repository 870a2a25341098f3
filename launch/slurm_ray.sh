#!/usr/bin/env bash
# Ray on one node of the job of slurm.sbatch: the head on the first, which the others join. SIGTERM ends it.
set -uo pipefail

asked="" ray=""
trap 'asked=yes' TERM

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
    wait "$ray" || code=$?
fi
if [[ -z "$asked" ]]; then
    echo "$SLURMD_NODENAME" >>"$MEGASTEP_LOGS/lost"
    echo "Ray ended by itself, with exit code $code; the last it said:"
    tail -n 20 "$folder"/session_latest/logs/{gcs_server,raylet}.{out,err} 2>/dev/null
    ((code)) || code=1
else
    # Slurm has sent SIGTERM to Ray too, unless it was too early. If that came while Ray started, it tries for long to
    # reach its parts, which have ended.
    for _ in {1..10}; do
        kill -TERM "$ray" 2>/dev/null || break
        sleep 1
    done
    kill -KILL "$ray" 2>/dev/null
    code=0
fi
rm -rf "$folder"
exit "$code"
