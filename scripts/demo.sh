#!/usr/bin/env bash
# Builds an INT8 and a BF16 engine, streams an answer and compares the four cells.
#   scripts/demo.sh [--prompt TEXT] [--model MODEL] [--short]
# MODEL: Hugging Face directory, hub id or GGUF file; SmolLM2-135M-Instruct by default. --short: a quick check.
set -euo pipefail

usage="usage: scripts/demo.sh [--prompt TEXT] [--model MODEL] [--short]"
prompt="Write a short story about a lighthouse keeper who finds a message in a bottle."
model=""
answer_tokens=128
short=""
bench=(--max-tokens 128 --repeats 3)
while [ $# -gt 0 ]; do
    case "$1" in
        --prompt | --model)
            [ $# -ge 2 ] || { echo "error: $1 needs a value; $usage" >&2; exit 1; }
            if [ "$1" = --prompt ]; then prompt="$2"; else model="$2"; fi
            shift 2
            ;;
        --short) answer_tokens=32 bench=(--max-tokens 16 --repeats 1) short=yes; shift ;;
        -h | --help) echo "$usage"; exit ;;
        *) echo "error: unknown argument '$1'; $usage" >&2; exit 1 ;;
    esac
done
case "$model" in
    /* | "") ;;
    *) [ ! -e "$model" ] || model="$(realpath "$model")" ;;
esac

. "$(dirname "$0")/venv.sh"
. scripts/demo_model.sh
install_into_venv gguf

outputs=demo_outputs
if [ -n "$model" ]; then
    outputs="demo_outputs/$(basename -- "$model" .gguf)-$(printf '%s' "$model" | sha256sum | head -c 8)"
else
    fetch_demo_model
    model="$demo_model"
fi

build() { # build NAME [OPTION...]: reuses an engine that this version can open
    local directory="$outputs/$1"
    if quasar-trt info "$directory" >/dev/null 2>&1; then
        echo "reusing $directory"
    else
        quasar-trt build --output-dir "$directory" --force "${@:2}" -- "$model"
    fi
}
build int8
build bf16 --quantization none

printf '\n> %s\n\n' "$prompt"
quasar-trt generate --chat --temperature 0 --max-tokens "$answer_tokens" -- "$outputs/int8" "$prompt"
echo
quasar-trt bench --int8 "$outputs/int8" --bf16 "$outputs/bf16" --prompts examples/prompts.jsonl --limit-per-task 1 \
    "${bench[@]}" --output "$outputs/bench.json"
[ -z "$short" ] || echo "The short form decodes too few tokens for its figures to mean much."
