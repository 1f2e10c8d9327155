#!/usr/bin/env bash
# The small study: 51M parameters, 118M tokens, trained at 512 tokens, one GPU. The same sizes, steps and seed for all.
# usage: runs/small_study.sh TEXT_FOLDER OUTPUT_FOLDER [SEED]
set -euo pipefail
text=$1 output=$2 seed=${3:-0}

softplus-attention data prepare "$text" --tokenizer gpt2 --validation-fraction 0.02 --output "$output/data"

train() {
    local name=$1
    shift
    softplus-attention train --preset small --data "$output/data" --output "$output/$name-seed$seed" --seed "$seed" "$@"
}

train softmax --attention softmax
train softmax-qknorm-logn --attention softmax-qknorm-logn
train lssa --attention lssa
train lssar-p3 --attention lssar --power 3
train lssar-p15 --attention lssar --power 15
train lssar-stepped --attention lssar --power 3,7@0.1,15@0.3
train lssar-ramp --attention lssar --power ramp:3,15
