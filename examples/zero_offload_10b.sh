#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trains a GPT-2 of 10 billion parameters on one 32 GB card, with the optimizer state on the host.
#   examples/zero_offload_10b.sh                     needs about 125 GB of host memory; options go to `twinflow train`
#   examples/zero_offload_10b.sh small               a small model with the same flags, with or without a GPU
set -eu
config="$(dirname "$0")/configs/zero_offload.json"
size="--num-layers 50 --hidden-size 4096 --num-attention-heads 32 --batch-size 10 --gpu-memory 32GB"
if [ "${1:-}" = small ]; then
    shift
    size="--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --batch-size 4 --vocab-size 256"
fi
# shellcheck disable=SC2086
exec twinflow train --model-parallel-size 1 $size --deepspeed_config "$config" --checkpoint-activations --steps 20 "$@"
