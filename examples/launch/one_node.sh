#!/usr/bin/env bash
# All GPUs of one machine: Lightning starts one process per GPU by itself.
#
#   examples/launch/one_node.sh --config configs/grpo_fp4.yaml --trainer.strategy ddp --trainer.precision bf16-mixed
#   examples/launch/one_node.sh --config ... --trainer.accelerator cpu --trainer.devices 2      (two processes, no GPU)
#
# data.batch_size is per process. ddp keeps a copy of the training state on every GPU; fsdp2 cuts it over all of them.
set -euo pipefail

# NVLink multicast fails on machines whose fabric is not set up for it; without it NCCL takes its other paths.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"

exec python -m trace_lightning.cli fit --trainer.devices auto --trainer.strategy ddp "$@"
