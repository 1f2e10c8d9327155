#!/usr/bin/env bash
# Newton from orbits on one H200, in steps of a few minutes each (docs/newton.md). Repeat a call that was interrupted:
# finished stages are skipped. Needs torch, transformers, accelerate and numpy; `laws` also scipy, pyoperon, matplotlib.
#
#   bash experiments/newton-h200.sh check                     # 1: the time per update, and whether coordinates alone are learned
#   bash experiments/newton-h200.sh arms softmax lssar        # 2-4: three seeds of each in parallel, labels 50, 200, 2000
#   bash experiments/newton-h200.sh arms softmax-window2 softmax-qknorm-logn
#   bash experiments/newton-h200.sh arms lssar-p3
#   bash experiments/newton-h200.sh faithful softmax          # 5-6: original distributions, 7000 bins, learned positions, raw F
#   bash experiments/newton-h200.sh faithful lssar
#   bash experiments/newton-h200.sh collect FILE.tar          # all JSON and arrays, without the weights
#   bash experiments/newton-h200.sh laws                      # on a machine with scipy, pyoperon and matplotlib
#
# All processes together make 70 to 75 updates per second (measured with five to fifteen processes); a run has 4,400, and
# its long sequences take one to two minutes more. Uses CUDA MPS if it is installed.
#
# Environment: PYTHON, OUT (newton-gpu), FAITHFUL_OUT (newton-faithful), MORE (further options, such as
# "--pretrain-steps 1500"; the same in every call on one folder).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
python=${PYTHON:-python3}
out=${OUT:-newton-gpu}
faithful_out=${FAITHFUL_OUT:-newton-faithful}
read -r -a more <<<"${MORE:-}"
trained=pretrain,probe,tune,long

newton() { "$python" -u -m softplus_attention.cli newton "$@" "${more[@]}"; }

share_the_gpu() {
  command -v nvidia-cuda-mps-control >/dev/null || return 0
  mps=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY="$mps/pipe" CUDA_MPS_LOG_DIRECTORY="$mps/log"
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$mps"' EXIT
}

case "${1:-}" in
  check)
    # 300 updates with and without differences as inputs, and a short tuning of each: seconds per update, a first R^2.
    for differences in no yes; do
      newton --preset gpu --output "$out-check-$differences" --arms lssar --seeds 0 --labels 200 --pretrain-steps 300 \
        --tune-steps 100 --test-systems 200 --without-pretraining no --differences "$differences" \
        --stages pretrain,probe,tune
    done
    ;;
  arms)
    shift
    [ $# -gt 0 ] || { echo "usage: newton-h200.sh arms NAME ..." >&2; exit 2; }
    share_the_gpu
    failed=0
    pids=()
    for arm in "$@"; do
      for seed in 0 1 2; do
        newton --preset gpu --output "$out" --arms "$arm" --seeds "$seed" --stages "$trained" --workers 1 \
          --save-every 500 &
        pids+=($!)
      done
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    exit "$failed"
    ;;
  faithful)
    newton --preset faithful --output "$faithful_out" --arms "${2:?the name of an arm}" --stages pretrain,probe,tune
    ;;
  collect)
    file=${2:?the name of the archive}
    folders=()
    for folder in "$out" "$faithful_out"; do if [ -d "$folder" ]; then folders+=("$folder"); fi; done
    if [ ${#folders[@]} = 0 ]; then echo "neither $out nor $faithful_out exists" >&2; exit 1; fi
    find "${folders[@]}" \( -name '*.json' -o -name '*.npz' \) -not -path '*/trainer/*' | tar -cf "$file" -T -
    ;;
  laws)
    newton --preset gpu --output "$out" --stages laws,figures
    if [ -d "$faithful_out" ]; then newton --preset faithful --output "$faithful_out" --stages laws,figures; fi
    ;;
  *)
    sed -n '2,18p' "$0"
    exit 2
    ;;
esac
