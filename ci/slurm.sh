#!/usr/bin/env bash
# Train on a Slurm cluster of one node, which is made for it and ended again, in each of the ways of docs/launching.md.
#
#   ci/slurm.sh
#
# Needs root and, of Debian's packages, slurmctld, slurmd, slurm-client, munge and slurm-wlm-basic-plugins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")
clean_up() {
    local daemon
    for daemon in slurmd slurmctld munged; do
        [ ! -f "$folder/$daemon.pid" ] || kill "$(cat "$folder/$daemon.pid")" || true
    done
    sleep 1
    rm -rf "$folder"
}
trap clean_up EXIT

mkdir -p "$folder"/{state,spool}
# munge refuses a folder that others can write to, and /tmp is one.
chmod 755 "$folder"
head -c 1024 /dev/urandom >"$folder/key"
chmod 400 "$folder/key"
munged --force --key-file="$folder/key" --socket="$folder/munge" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munge.log" --seed-file="$folder/seed"
cat >"$folder/slurm.conf" <<CONF
ClusterName=here
SlurmctldHost=$(hostname)
AuthType=auth/munge
AuthInfo=socket=$folder/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
NodeName=$(hostname) CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
export SLURM_CONF=$folder/slurm.conf
slurmctld -c
slurmd

cat >"$folder/job.sh" <<'JOB'
#!/bin/bash
set -euo pipefail
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TF_CPP_MIN_LOG_LEVEL=3
train="examples/torch_digits.py --compression sidco --ratio 0.01 --epochs 1"
try() { printf '%-24s' "$1:"; shift; "$@" 2>/dev/null | grep -o 'epoch  1 .*'; }
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$SLURM_NTASKS_PER_NODE/" | paste -sd,)
try mpirun mpirun --bind-to none python $train
try "srun --mpi=pmix" srun --mpi=pmix python $train
try horovodrun horovodrun --gloo -np "$SLURM_NTASKS" -H "$hosts" python $train
try "srun torchrun" srun --ntasks-per-node=1 --ntasks="$SLURM_NNODES" \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint "${hosts%%:*}:29500" $train --transport ddp
JOB
export PATH=$PWD/.venv/bin:$PATH
sbatch --quiet --wait --nodes=1 --ntasks-per-node=2 --time=5 --output="$folder/output" "$folder/job.sh" && failed=0 || failed=$?
cat "$folder/output"
exit "$failed"
