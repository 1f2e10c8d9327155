#!/usr/bin/env bash
# The model in models/bytes: 4.7M parameters, bytes of the package's own text, trained at 256 bytes. A minute or two on
# one GPU, an hour on two cores.
# usage: runs/shipped_model.sh OUTPUT_FOLDER
set -euo pipefail
output=$1
run() { "${PYTHON:-python3}" -m softplus_attention.cli "$@"; }

run data prepare builtin --tokenizer bytes --validation-fraction 0 --output "$output/data"
run train --data "$output/data" --output "$output/run" --attention lssar --power 3,7@0.1,15@0.3 \
    --layers 6 --width 256 --heads 4 --sequence-length 256 --window 128 --global-every 3 \
    --optimizer muon --muon-learning-rate 5e-3 --learning-rate 3e-3 --steps 2000 --batch-size 64 --micro-batch-size 64 \
    --final-learning-rate 0.05 --log-every 100 --save-every 2000 "${@:2}"
"${PYTHON:-python3}" - "$output" <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import softplus_attention.huggingface

run, shipped = Path(sys.argv[1]) / "run/model", Path(sys.argv[1]) / "model"
AutoModelForCausalLM.from_pretrained(run, dtype=torch.bfloat16).save_pretrained(shipped)
AutoTokenizer.from_pretrained(run).save_pretrained(shipped)
print(f"the model is in {shipped}")
PYTHON
