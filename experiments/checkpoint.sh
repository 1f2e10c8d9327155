#!/usr/bin/env bash
# Trains the model in checkpoints/bytes-2.7m on the text of the package: most of an hour on two idle cores.
# Run it again to continue an interrupted run.
#
#   bash experiments/checkpoint.sh [FOLDER] [DESTINATION]
set -euo pipefail
folder=${1:-build/checkpoint}
destination=${2:-checkpoints/bytes-2.7m}
softplus-attention data prepare builtin --tokenizer bytes --validation-fraction 0.1 --output "$folder/data"
softplus-attention train --preset tiny --data "$folder/data" --output "$folder/run" \
  --power learned-log --layers 6 --width 192 --heads 3 --global-every 3 --window 128 --sequence-length 256 \
  --steps 1400 --muon-learning-rate 5e-3 --save-every 200 --evaluate-every 200
python "$(dirname "$0")/ship.py" "$folder/run/model" "$destination"
