#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: tests and times the kernels, runs engines of every stack that is there beside the reference
# engine and as the four cells, and saves every figure as JSON.
#   scripts/gpu_check.sh [FILE.json [MODEL]]
# MODEL: Hugging Face directory, hub id or GGUF file; SmolLM2-135M-Instruct by default.
set -euo pipefail

output="$(realpath -- "${1:-gpu_check.json}")"
model="${2:-}"
[ ! -e "$model" ] || model="$(realpath -- "$model")"
. "$(dirname "$0")/venv.sh"
. scripts/demo_model.sh
install_into_venv test
if [ -z "$model" ]; then
    fetch_demo_model
    model="$demo_model"
fi
python -m quasar_trt.bench.gpu_check "$output" "$model" examples/prompts.jsonl
