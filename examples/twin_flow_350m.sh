#!/bin/sh
# GPT-350M with Twin-Flow: 30% of the optimizer's state on the host, 70% on the GPU, updated at the same time.
#   examples/twin_flow_350m.sh                       the real thing; further options go to `twinflow train`
#   examples/twin_flow_350m.sh small                 the same flags at a size for a laptop, GPU or not
set -eu
config="$(dirname "$0")/configs/twin_flow.json"
size="--preset gpt-350m"
if [ "${1:-}" = small ]; then
    shift
    size="--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --batch-size 4 --vocab-size 256"
fi
# shellcheck disable=SC2086
exec twinflow train $size --no-pipeline-parallel --cpu-optimizer --deepspeed_config "$config" --steps 20 "$@"
