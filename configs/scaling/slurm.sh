#!/bin/bash
# A job that resumes after it was preempted or ran out of time:
#   sbatch configs/scaling/slurm.sh CONFIG RUN_NAME [OPTION...]
# Five minutes before the end, SLURM sends SIGTERM to every process. The training finishes the current step, writes
# last.ckpt and exits with code 143. The script then requeues the job, which resumes from last.ckpt.
# Runs are in runs/ of the folder from which you submit; the option --run.root is not supported.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
config=$1 name=$2
shift 2
resume=()
if compgen -G "runs/$name/version_*/checkpoints/last.ckpt" > /dev/null; then
    resume=(--ckpt_path "runs/$name")
fi
srun swbn fit --config "$config" --config configs/scaling/several_machines.yaml --run.name "$name" \
    --trainer.plugins "{class_path: lightning_fabric.plugins.environments.SLURMEnvironment, init_args: {auto_requeue: false}}" \
    "${resume[@]}" "$@"
code=$?
# srun gives the highest code of its tasks.
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
