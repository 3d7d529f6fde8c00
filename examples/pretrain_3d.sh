#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Pretrains a GPT on pipeline x tensor x data ranks. Data ranks share the optimizer state (ZeRO-1), which is on the host.
#   examples/pretrain_3d.sh                          8 GPUs of one machine: 2 stages x 2 tensor ranks x 2 replicas
#   examples/pretrain_3d.sh --hostfile hosts         all GPUs of the machines in this file
#   examples/pretrain_3d.sh small --steps 5          a small model, also without GPUs; options go to `twinflow train`
set -eu
config="$(dirname "$0")/configs/pretrain_3d.json"
launch="--num_gpus 8"
size="--preset gpt2-1.5b --steps 200"
case "${1:-}" in
small)
    shift
    launch="--num_gpus 4"
    size="--num-layers 4 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --batch-size 2 --vocab-size 256 --steps 10"
    ;;
--hostfile)
    launch="--hostfile $2"
    shift 2
    ;;
esac
# shellcheck disable=SC2086
exec twinflow launch $launch --module twinflow train $size --pipeline-parallel-size 2 --model-parallel-size 2 \
    --pipeline-schedule 1f1b --deepspeed_config "$config" "$@"
