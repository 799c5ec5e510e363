#!/usr/bin/env bash
# The kernel tests under the address and undefined-behaviour sanitizers. Needs the test extra and cmake, ninja, nanobind.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cmake -S csrc -B "$build" -G Ninja -DKVILT_SANITIZE=ON -DPython_EXECUTABLE="$(command -v python)" > "$build/log"
ninja -C "$build" >> "$build/log" || { tail -n 40 "$build/log"; exit 1; }
# Python itself is not built with the sanitizer, so it has to come first; leaks of the interpreter are not ours.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0
# Loaded by its path, so that an installed build cannot take its place.
python - "$build"/_kvilt_native*.so "$@" <<'PYTHON'
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

spec = spec_from_file_location("_kvilt_native", sys.argv[1])
sys.modules["_kvilt_native"] = module = module_from_spec(spec)
spec.loader.exec_module(module)
sys.path.insert(0, ".")
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "tests/ops", *sys.argv[2:]]))
PYTHON
