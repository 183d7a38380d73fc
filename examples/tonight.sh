#!/usr/bin/env bash
# An evening with offmate, from a model and chats to a fine-tuned model that answers. docs/tonight.md explains each step.
#
#   examples/tonight.sh                                   # a tiny chat model, made on the spot; a few minutes, no GPU
#   MODEL=./my-model DATA=chats.jsonl GPU_BUDGET=11GiB CPU_BUDGET=28GiB MORE= examples/tonight.sh
#
# The commands of the Python environment that has offmate are used: activate it first. OUTPUT must not exist.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

MODEL=${MODEL:-}
DATA=${DATA:-}
OUTPUT=${OUTPUT:-tuned}
GPU_BUDGET=${GPU_BUDGET:-16MiB}
CPU_BUDGET=${CPU_BUDGET:-4GiB}
PROMPT=${PROMPT:-What is the capital of France?}
# Options for the tiny model. --device emulated: the CPU plays the GPU.
MORE=${MORE---device emulated --sequence-length 64 --learning-rate 5e-3 --epochs 2 --checkpoint-every 20}

say() { printf '\n== %s\n' "$*"; }

if [ -z "$MODEL" ]; then
  say "a tiny chat model and chats"
  python "$here/tiny_chat.py" tiny --dtype "${DTYPE:-bfloat16}"
  MODEL=tiny/model DATA=tiny/chats.jsonl
fi
# shellcheck disable=SC2206  # MORE is several words
options=(--model "$MODEL" --data "$DATA" --output "$OUTPUT" --lora 16 --gpu-budget "$GPU_BUDGET"
  --cpu-budget "$CPU_BUDGET" --sample "$PROMPT" --sample-tokens 16 $MORE)

say "does it fit a card, and how fast would it be?"
offmate plan "$MODEL" --lora 16 --batch 4 --seq-len 64 --card rtx3060 --ram 32GiB

say "which models do?"
offmate fits --card rtx3060 --ram 32GiB --only gpt2

say "a dry run: what the run takes; no weights are read"
offmate finetune "${options[@]}" --dry-run

say "the run, killed after its first checkpoint"
offmate finetune "${options[@]}" --yes &
run=$!
until compgen -G "$OUTPUT/checkpoints/step-*" >/dev/null; do
  kill -0 $run 2>/dev/null || { echo "the run ended without a checkpoint" >&2; exit 1; }
  sleep 0.05
done
kill -KILL $run 2>/dev/null || { echo "the run was over before it could be killed: make it longer" >&2; exit 1; }
wait $run 2>/dev/null || true

say "the rest of it, from the newest checkpoint, with an evaluation and a sample after each one; then merged"
offmate finetune --output "$OUTPUT" --resume --merge --yes

say "used by plain transformers, without offmate"
python "$here/ask.py" "$OUTPUT/merged" "$PROMPT"
