"""kvilt beside the CPU runtimes people use, alternately, in one run: tokens per second, and the ratios kvilt / peer.

    python bench/cpu_peers.py [--model smollm2-q4_1] [--only kvilt,llama.cpp] [--workloads prefill:512,decode,batch:8]
                              [--rounds 5] [--threads 2] [--seconds 150] [--json FILE]

Each runtime lives in a process of its own; a round takes one sample of each, one after the other, and the median over
the rounds counts. Only ratios within one run mean something. A sample during which other processes used the machine is
taken again; what noise remained is printed. A runtime whose package or model is missing is left out with a line.

The peers run in a virtual environment of their own, ~/.cache/kvilt-bench/venv (or KVILT_PEERS_PYTHON, or --python
NAME=PATH); kvilt runs in the interpreter of this script, with the extension --native FILE if given (behind an editable
install a PYTHONPATH does not choose it).

    python -m venv ~/.cache/kvilt-bench/venv && . ~/.cache/kvilt-bench/venv/bin/activate
    pip install -c constraints.txt llama-cpp-python gguf            # builds llama.cpp for this machine
    pip install -c constraints.txt torch transformers accelerate onnxruntime-genai onnx_ir openvino-genai ctranslate2
    python bench/peers/make_q4_0.py SmolLM2-135M-Instruct.Q4_1.gguf ~/.cache/kvilt-bench/SmolLM2-135M-Instruct.Q4_0.gguf
    python bench/peers/convert.py SmolLM2-135M-Instruct.Q4_1.gguf hf onnx-int4 ct2-int8   # the others, same weights
    python -m venv export && export/bin/pip install torch openvino nncf "optimum-intel>=1.25" "transformers<5"
    KVILT_EXPORT_PYTHON=export/bin/python python bench/peers/convert.py SmolLM2-135M-Instruct.Q4_1.gguf openvino-int4

 prefill:N    N / seconds to the first token of a prompt of N
 decode:N     tokens/s after the first token, one row behind a prompt of N
 batch:N      tokens/s of N rows together after their first tokens, prompts of 16
 cold         seconds from the start of a process to the first token, files in the page cache
 memory       peak resident MB of a process that reads 1,024 tokens and writes 64
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from peers.children import Missing, Server, limits, once, torch_alone
from peers.engines import BACKEND, NATIVE
from peers.models import MODELS, Candidate, candidates
from peers.noise import wait_quiet
from peers.series import TORCH, Series, limits_line, noise_line, report
from peers.workloads import DEFAULT, FRESH, FRESH_ROUNDS, chosen, parse

# What keeps a runtime from AVX-512; llama.cpp would have to be built so, and onnxruntime cannot be told.
AVX2 = {BACKEND: "native/avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "CT2_FORCE_CPU_ISA": "AVX2"}
AVX2 |= {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def measure_warm(series: Series, servers: dict[str, Server], names: list[str], rounds: int, until_s: float) -> int:
    """Round robin over the engines; returns the rounds that were finished before the time was up."""
    for number in range(rounds):
        for name in names:
            for engine, server in servers.items():
                if time.monotonic() > until_s:
                    return number
                _progress(f"round {number + 1}/{rounds} {name} {engine}")
                try:
                    answer = server.ask(parse(name))
                    series.add(name, engine, answer["rate"], answer)
                except Missing as error:
                    print(f"{engine} gave no {name}: {error}", file=sys.stderr)
    _progress("")
    return rounds


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)


def measure_fresh(series: Series, engines: list[Candidate], names: list[str], threads: int, until_s: float) -> None:
    """Cold starts and peak memory, a new process each, with the price of importing torch beside them."""
    python = next((engine.python for engine in engines if engine.name == "kvilt"), sys.executable)
    for name in names:
        for number in range(FRESH_ROUNDS[name]):
            _progress(f"{name} {number + 1}/{FRESH_ROUNDS[name]}")
            for engine in engines:
                if time.monotonic() > until_s:
                    return
                _fresh(series, name, engine.name, partial(once, engine, threads, *FRESH[name]))
            _fresh(series, name, TORCH, partial(torch_alone, python))
    _progress("")


def _fresh(series: Series, name: str, engine: str, run: Callable[[], dict[str, Any]]) -> None:
    try:
        answer = run()
    except Missing as error:
        print(f"{engine} gave no {name}: {error}", file=sys.stderr)
        return
    # Memory is the same on a busy machine.
    calm = answer if name == "cold" else {**answer, "disturbed": False}
    series.add(name, engine, answer["first_s"] if name == "cold" else answer["peak_bytes"] / 1e6, calm)


def start(engines: list[Candidate], threads: int) -> dict[str, Server]:
    servers = {}
    for engine in engines:
        try:
            servers[engine.name] = Server(engine, threads)
            print(f"{engine.name}: {servers[engine.name].about}")
        except Missing as error:
            print(f"{engine.name} is left out: {error}")
    return servers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-q4_1", help=f"{', '.join(MODELS)}, or a .gguf file")
    parser.add_argument("--only", default="", help="engines, separated by commas; all if not given")
    parser.add_argument("--workloads", default=",".join(DEFAULT))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="an engine's interpreter")
    parser.add_argument("--native", type=Path, help="a file of kvilt's extension to use instead of the installed one")
    parser.add_argument("--avx2", action="store_true", help="as without AVX-512, those that can be told so")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine")
    parser.add_argument("--seconds", type=float, default=math.inf, help="take no further samples after this time")
    parser.add_argument("--json", type=Path, help="write everything here")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    until_s = time.monotonic() + asked.seconds
    pythons = dict(entry.split("=", 1) for entry in asked.python)
    names, only = chosen(asked.workloads), [name for name in asked.only.split(",") if name]
    engines = candidates(asked.model, only, pythons)
    if asked.native:
        os.environ[NATIVE] = str(asked.native.resolve(strict=True))
    if asked.avx2:
        os.environ |= AVX2
    python = next((engine.python for engine in engines if engine.name == "kvilt"), sys.executable)
    size = MODELS.get(asked.model, Path(asked.model)).stat().st_size
    busy, series = wait_quiet(asked.patience), Series()
    warm = [name for name in names if name not in FRESH]
    series.limits.append(limits(python, asked.threads, size))
    servers = start(engines, asked.threads)
    engines = [engine for engine in engines if engine.name in servers]
    if not engines:
        raise SystemExit("no runtime is left to measure")
    try:
        rounds = measure_warm(series, servers, warm, asked.rounds, until_s)
    finally:
        for server in servers.values():
            server.close()
    series.limits.append(limits(python, asked.threads, size))
    measure_fresh(series, engines, [name for name in names if name in FRESH], asked.threads, until_s)
    medians = f"medians of {rounds} whole rounds, " if warm else ""
    title = f"{asked.model}, {asked.threads} threads, {medians}{time.strftime('%F %R')}"
    print(f"{title}\n\n{report(series, names, [engine.name for engine in engines])}\n")
    print(f"{limits_line(series)}\n{noise_line(series, busy)}")
    if asked.json:
        asked.json.write_text(json.dumps(_record(asked, series, busy), indent=1))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _record(asked: argparse.Namespace, series: Series, busy: float) -> dict[str, Any]:
    medians = {n: {e: statistics.median(v) for e, v in by.items()} for n, by in series.values.items()}
    about = {"model": asked.model, "threads": asked.threads, "rounds": asked.rounds, "machine": _processor()}
    noise = {"busy_before": busy, "by_sample": series.noise, "again": series.again, "disturbed": series.disturbed}
    return {
        **about,
        "medians": medians,
        "samples": series.values,
        "tokens": series.tokens,
        "limits": series.limits,
        "noise": noise,
    }


if __name__ == "__main__":
    main()
