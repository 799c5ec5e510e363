#!/usr/bin/env bash
# The CPU kernels of a machine, from the root of a checkout: `bench/on_cpu.sh [INSTRUCTION SET ...]`. Builds them, runs
# their tests, and times these instruction sets beside each other, with short and with long prompts.
# Needs torch, pytest, hypothesis, safetensors, tokenizers, nanobind, cmake and ninja, and no installed kvilt.
# SHAPE=8b FORMATS="Q4_0 Q4_K" ROUNDS=2 CONTEXT=8192 are the defaults.
set -euo pipefail
cd "$(dirname "$0")/.."
export CUDA_VISIBLE_DEVICES= # tests of the native backend are about the CPU
sets=("$@")
[ ${#sets[@]} -gt 0 ] || sets=(amx amx-bf16 amx-attention)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

cmake -S csrc -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v python)" >"$build/log"
ninja -C "$build" >>"$build/log" || { tail -n 40 "$build/log"; exit 1; }
export PYTHONPATH="$build:$PWD"
python -m pytest -q -p no:cacheprovider --tb=short -o addopts=--import-mode=importlib \
  tests/ops/test_native.py tests/ops/test_amx.py tests/ops/test_amx_bf16.py tests/ops/test_attention_blocks.py

long="prefill:${CONTEXT:-8192} decode:${CONTEXT:-8192}"
for format in ${FORMATS:-Q4_0 Q4_K}; do
  # shellcheck disable=SC2086
  python bench/cpu_shapes.py --shape "${SHAPE:-8b}" --format "$format" --isa "${sets[@]}" --rounds "${ROUNDS:-2}" \
    --workloads prefill decode batch:8 batch:32 $long
done
