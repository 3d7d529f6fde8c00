#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trains GPT-350M with Twin-Flow: 30% of the optimizer state is on the host, 70% on the GPU.
#   examples/twin_flow_350m.sh                       GPT-350M; further options go to `twinflow train`
#   examples/twin_flow_350m.sh small                 a small model with the same flags, with or without a GPU
set -eu
config="$(dirname "$0")/configs/twin_flow.json"
size="--preset gpt-350m"
if [ "${1:-}" = small ]; then
    shift
    size="--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --batch-size 4 --vocab-size 256"
fi
# shellcheck disable=SC2086
exec twinflow train $size --no-pipeline-parallel --cpu-optimizer --deepspeed_config "$config" --steps 20 "$@"
