#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What a user of docs/tutorial-zero-offload.md sees: the log of a GPT-2 of 10 billion parameters in 32 GB of GPU memory,
# and nvidia-smi, free and top in the middle of the training.
#   benchmarks/tutorial_log.sh FOLDER                writes FOLDER/tutorial-log.txt and FOLDER/tutorial-seen.txt
#   benchmarks/tutorial_log.sh FOLDER small          the same at a size for a laptop, GPU or not
# Environment: STEPS (6), LIMIT in seconds (88) after which the training is stopped, PYTHON (python3).
set -eu
folder=${1:?usage: benchmarks/tutorial_log.sh FOLDER [small]}
root=$(cd "$(dirname "$0")/.." && pwd)
steps=${STEPS:-6}
size="--num-layers 50 --hidden-size 4096 --num-attention-heads 32 --batch-size 10 --gpu-memory 32GB"
if [ "${2:-}" = small ]; then
    size="--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --batch-size 4 --vocab-size 256"
fi
mkdir -p "$folder"
run=$(mktemp -d)
log=$folder/tutorial-log.txt
seen=$folder/tutorial-seen.txt
show() {
    echo "\$ $*"
    "$@" 2>&1 || true
    echo
}
# shellcheck disable=SC2086
PYTHONUNBUFFERED=1 timeout -k 5 "${LIMIT:-88}" "${PYTHON:-python3}" -m twinflow train --model-parallel-size 1 $size \
    --deepspeed_config "$root/examples/configs/zero_offload.json" --checkpoint-activations --steps "$steps" \
    --grad-clip 0 --valid-every 0 --no-save --out "$run/out" >"$log" 2>&1 &
training=$!
while kill -0 "$training" 2>/dev/null && ! grep -q "^step $((steps - 2))/" "$log"; do
    sleep 0.1
done
{
    show nvidia-smi
    show free -g
    show top -b -n 2 -d 1 -w 120 | tail -n +3 | awk '/^top/ { frame++ } frame == 2' | head -n 14  # the first frame is since boot
} >"$seen"
status=0
wait "$training" || status=$?
cat "$log" "$seen"
echo "twinflow train ended with $status"
rm -rf "$run"
