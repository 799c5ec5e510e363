#!/usr/bin/env bash
# The tests that need a CUDA device, from the root of a checkout: `bench/on_gpu.sh`. Takes at most five minutes.
# Runs from the source tree: needs torch, triton, pytest, hypothesis, safetensors and tokenizers, and no installed kvilt.
set -euo pipefail
cd "$(dirname "$0")/.."
exec env PYTHONPATH=. python -m pytest -q -m gpu tests/gpu -p no:cacheprovider -o addopts="--import-mode=importlib" "$@"
