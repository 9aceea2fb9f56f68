#!/usr/bin/env bash
# Stages of a run as one Slurm job. From the checkout, after `make setup`:
#
#   sbatch docs/batch/slurm.sh kimi-k2.5 00 01                                     (answers)
#   sbatch --dependency=afterok:JOB docs/batch/slurm.sh kimi-k2.5 02 03 04 05      (states to checkpoint)
#   sbatch --dependency=afterok:JOB docs/batch/slurm.sh kimi-k2.5 06 07            (load and serve)
#
# A job that is cut goes on where it stopped when it is submitted again. EAGLEBOOK_OUTPUTS names a folder that all machines see.
#SBATCH --job-name=eaglebook
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

preset=${1:?a preset of params/}
shift
exec "${EAGLEBOOK:-.venv/bin/eaglebook}" run --preset "$preset" $(printf -- '--stage %s ' "$@")
