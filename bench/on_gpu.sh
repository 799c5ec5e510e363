#!/usr/bin/env bash
# The tests that need a CUDA device, from the root of a checkout: `bench/on_gpu.sh [options of pytest]`.
# They are dealt out to several processes, since most of their time is compiling kernels on the CPU: PROCESSES=8.
# Runs from the source tree: needs torch, triton, pytest, hypothesis, safetensors and tokenizers, and no installed kvilt.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.
processes=${PROCESSES:-8}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run=(python -m pytest -q -m gpu -p no:cacheprovider --tb=short -o addopts=--import-mode=importlib)

if ! "${run[@]}" --collect-only tests/gpu "$@" | grep :: >"$logs/all"; then
  echo "no tests to run: torch sees no CUDA device, or the options leave none"
  exit 1
fi
split -n "r/$processes" "$logs/all" "$logs/part."
declare -A running
for part in "$logs"/part.*; do
  [ -s "$part" ] || continue
  "${run[@]}" "@$part" >"$part.log" 2>&1 &
  running[$!]=$part.log
done
failed=0
for process in "${!running[@]}"; do
  wait "$process" || {
    failed=1
    grep -v '^\.*$' "${running[$process]}" | tail -150
  }
done
tail -qn 1 "$logs"/part.*.log
exit $failed
