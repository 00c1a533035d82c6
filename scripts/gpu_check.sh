#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: tests the kernels on it, times them, and saves every figure as JSON.
#   scripts/gpu_check.sh [FILE.json]
set -euo pipefail

output="$(realpath -- "${1:-gpu_check.json}")"
. "$(dirname "$0")/venv.sh"
install_into_venv test
python -m quasar_trt.bench.gpu_check "$output"
