#!/usr/bin/env bash
# 02 in four shares, a machine each: ranks 1 to 3 as an array, then rank 0, which takes their files and is the run's own 02.
#
#   shares=$(sbatch --parsable --array=1-3 docs/batch/slurm_shares.sh kimi-k2.5 4)
#   sbatch --dependency=afterok:$shares --array=0 docs/batch/slurm_shares.sh kimi-k2.5 4
#
#SBATCH --job-name=eaglebook-states
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%A-%a.log
set -euo pipefail

preset=${1:?a preset of params/} world_size=${2:?how many machines}
exec "${EAGLEBOOK:-.venv/bin/eaglebook}" run --preset "$preset" --stage 02 \
  --set "02.world_size=$world_size" --set "02.rank=${SLURM_ARRAY_TASK_ID:?submit with --array}"
