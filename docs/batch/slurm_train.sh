#!/usr/bin/env bash
# 04 on several machines: the notebook on the first, torchrun's workers on the others, all over one outputs folder.
#
#   sbatch --nodes=2 docs/batch/slurm_train.sh kimi-k2.5
#
#SBATCH --job-name=eaglebook-train
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

preset=${1:?a preset of params/}
if [[ -z ${SLURM_PROCID:-} || -z ${EAGLEBOOK_FIRST:-} ]]; then # once, in the batch script: start a task on each machine
  EAGLEBOOK_FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
  export EAGLEBOOK_FIRST
  exec srun "$0" "$@"
fi
meet=$EAGLEBOOK_FIRST:29500
if [[ $SLURM_PROCID == 0 ]]; then
  exec "${EAGLEBOOK:-.venv/bin/eaglebook}" run --preset "$preset" --stage 04 \
    --set "common.nodes=$SLURM_NNODES" --set "04.rendezvous=$meet"
fi
job=${EAGLEBOOK_OUTPUTS:-outputs}/$preset/04_train.next/artifacts/job.json # what the notebook on the first machine writes
until [[ -f $job ]]; do sleep 5; done
exec "${PYTHON:-.venv/bin/python}" -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_PROCID" --rdzv-backend c10d \
  --rdzv-id eaglebook --rdzv-endpoint "$meet" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" -m eaglebook.train_worker "$job"
