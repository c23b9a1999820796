#!/usr/bin/env bash
# Trains on GPUs of several machines under SLURM:
#
#   sbatch --nodes=4 launch/slurm.sh --gin_file=configs/quickstart.gin --gin.MODEL_DIR="'/shared/runs/a'"
#
# What stands after the script's name goes to m6jax. MODEL_DIR is on a disk that all machines share.
# SLURM starts a process for each GPU, which is what jax expects under SLURM, and jax finds the others
# in SLURM's environment. Two minutes before the time is over, or where SLURM takes the machines back,
# the run saves its state and ends with code 75; the job is then put into the queue again, and goes on.

#SBATCH --job-name=m6jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=m6jax-%j.log

set -euo pipefail

PREEMPTED=75
code=0
# With --kill-on-bad-exit a process that dies ends the step; m6jax ends the others itself, with code 1.
srun --kill-on-bad-exit=1 --label python -u -m m6jax.main "$@" || code=$?
if [ "$code" -eq "$PREEMPTED" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
