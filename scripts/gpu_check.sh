#!/usr/bin/env bash
# What one GPU (80 GB or more) shows in eight minutes: the tests that need one, then what each technique costs or gains.
#   scripts/gpu_check.sh [--rehearse] [FOLDER]
# Figures go to FOLDER/gpu.json (outputs/gpu_check without one), the table to stdout. --rehearse goes the same way with
# toy sizes, on a CPU too.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then
  python=.venv/bin/python
fi

changes=()
if [[ ${1:-} == --rehearse ]]; then
  shift
  changes=(--warmup 1 --steps 2 --model.flavor=toy --training.seq_len=64 --training.mixed_precision_param=float32
    --compile.backend=aot_eager --float8.emulate)
fi
folder=${1:-outputs/gpu_check}
mkdir -p "$folder"

failed=0
"$python" -m pytest -q -m gpu tests/gpu || failed=1
# The tests' time counts too. A row that is refused or left out stands in the table with the reason.
"$python" scripts/benchmark.py --table scripts/benchmarks/gpu.toml --limit $((470 - SECONDS)) \
  --json "$folder/gpu.json" "${changes[@]}" || failed=1
exit "$failed"
