#!/usr/bin/env bash
# One node or many, by torchrun. Run the same line on every node; HEAD is the address of any one of them.
#
#   NNODES=2 HEAD=10.0.0.1 examples/launch/torchrun.sh --config CONFIG --trainer.strategy fsdp2 --runs_dir /shared/runs
#
# torchrun ends all processes of a node when one of them fails, and the rendezvous ends those of the other nodes. With
# RESTARTS above 0 it starts them again; give --ckpt_path a file that is there by then, or the run begins anew.
set -euo pipefail

NNODES="${NNODES:-1}"
NPROC="${NPROC:-gpu}" # processes per node: a number, or one per GPU
HEAD="${HEAD:-localhost}"
PORT="${PORT:-29400}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"

# Lightning takes the number of processes per node as the number of devices, and checks it.
if [ "$NPROC" = gpu ]; then DEVICES=auto; else DEVICES="$NPROC"; fi

exec python -m torch.distributed.run \
    --nnodes "$NNODES" --nproc_per_node "$NPROC" --max_restarts "${RESTARTS:-0}" \
    --rdzv_backend c10d --rdzv_endpoint "$HEAD:$PORT" --rdzv_id trace-lightning \
    -m trace_lightning.cli fit --trainer.num_nodes "$NNODES" --trainer.devices "$DEVICES" "$@"
