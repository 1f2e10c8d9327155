#!/usr/bin/env bash
# The paper's run: GPT-2 small with RoPE, FineWeb-10B, 18,865 steps of 524,288 tokens at length 1024.
# usage: experiments/paper_gpt2_small.sh DATA_FOLDER OUTPUT_FOLDER [ATTENTION [POWER]]      (GPUS=8 by default)
# Run it again to continue an interrupted run. ATTENTION is softmax, lssa, lssar, ...; POWER as in docs/training.md.
set -euo pipefail
data=$1 output=$2 attention=${3:-lssar} power=${4:-}

[ -f "$data/index.json" ] || softplus-attention data prepare fineweb:sample-10BT --tokenizer gpt2 --output "$data"

torchrun --nproc-per-node "${GPUS:-8}" -m softplus_attention.cli train --preset gpt2-small \
    --data "$data" --output "$output/$attention${power:+-p$power}" --attention "$attention" ${power:+--power "$power"}
