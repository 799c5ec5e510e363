"""kvilt beside the CPU runtimes people use, alternately, in one run: tokens per second, and the ratios kvilt / peer.

    python bench/cpu_peers.py [--model smollm2-q4_1] [--only kvilt,llama.cpp] [--workloads prefill:512,decode,batch:8]
                              [--rounds 5] [--threads 2] [--json FILE]

Each runtime lives in a process of its own; a round takes one sample of each, one after the other, and the median over
the rounds counts. Only ratios within one run mean something. A sample during which other processes used the machine is
taken again; what noise remained is printed. A runtime whose package or model is missing is left out with a line.

The peers run in a virtual environment of their own, ~/.cache/kvilt-bench/venv (or KVILT_PEERS_PYTHON, or --python
NAME=PATH); kvilt runs in the interpreter of this script.

    python -m venv ~/.cache/kvilt-bench/venv && . ~/.cache/kvilt-bench/venv/bin/activate
    pip install -c constraints.txt llama-cpp-python gguf            # builds llama.cpp for this machine
    pip install -c constraints.txt torch transformers onnxruntime-genai onnx_ir openvino-genai ctranslate2
    python bench/peers/make_q4_0.py SmolLM2-135M-Instruct.Q4_1.gguf ~/.cache/kvilt-bench/SmolLM2-135M-Instruct.Q4_0.gguf
    python bench/peers/convert.py SmolLM2-135M-Instruct.Q4_1.gguf   # the folders of the others, same weights

 prefill:N    N / seconds to the first token of a prompt of N
 decode:N     tokens/s after the first token, one row behind a prompt of N
 batch:N      tokens/s of N rows together after their first tokens, prompts of 16
 cold         seconds from the start of a process to the first token, files in the page cache
 memory       peak resident MB of a process that reads 1,024 tokens and writes 64
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.children import Missing, Server, once, torch_alone
from peers.models import MODELS, Candidate, candidates
from peers.noise import wait_quiet
from peers.workloads import COLD, DEFAULT, FRESH, MEMORY, chosen, parse

TORCH = "import torch"


@dataclass(slots=True)
class Series:
    """All samples of one run: values by workload and engine, and what disturbed them."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    noise: list[dict[str, float]] = field(default_factory=list)
    again: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def add(self, workload: str, engine: str, value: float) -> None:
        self.values.setdefault(workload, {}).setdefault(engine, []).append(value)

    def median(self, workload: str, engine: str) -> float | None:
        values = self.values.get(workload, {}).get(engine)
        return statistics.median(values) if values else None


def measure_warm(series: Series, servers: dict[str, Server], names: list[str], rounds: int) -> None:
    """Round robin over the engines, workload by workload."""
    for name in names:
        workload = parse(name)
        for number in range(rounds):
            for engine, server in list(servers.items()):
                _progress(f"{name} {number + 1}/{rounds} {engine}")
                try:
                    answer = server.ask(workload)
                except Missing as error:
                    print(f"{engine} gave no {name}: {error}", file=sys.stderr)
                    continue
                series.add(name, engine, answer["rate"])
                series.noise.append(answer["noise"])
                series.again += answer["tries"] - 1
                series.tokens.setdefault(engine, answer["tokens"])
    _progress("")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)


def measure_fresh(series: Series, engines: list[Candidate], names: list[str], rounds: int, threads: int) -> None:
    """Cold starts and peak memory, a new process each, with the price of importing torch beside them."""
    for name in names:
        prompt, new = COLD if name == "cold" else MEMORY
        for number in range(rounds + 1):
            answers = {engine.name: once(engine, threads, prompt, new) for engine in engines}
            answers[TORCH] = torch_alone(sys.executable)
            if number == 0:
                continue  # brings the files into the page cache
            for engine, answer in answers.items():
                series.add(name, engine, answer["first_s"] if name == "cold" else answer["peak_bytes"] / 1e6)
            if "kvilt" in answers:
                beyond = series.values[name]["kvilt"][-1] - series.values[name][TORCH][-1]
                series.add(name, "kvilt beyond torch", beyond)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, workload: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if workload == "cold" else f"{value:.0f} MB" if workload == "memory" else f"{value:.1f}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if ours is None or not theirs else f"{ours / theirs:.2f}x"


def report(series: Series, names: list[str], engines: list[str]) -> str:
    """Both tables: what each reached, and kvilt against each and against the best."""
    head = ["", *names]
    extra = ["kvilt beyond torch", TORCH] if any(name in FRESH for name in names) else []
    shown = [[engine, *[_number(series.median(name, engine), name) for name in names]] for engine in engines + extra]
    parts = [table(head, shown)]
    peers = [engine for engine in engines if engine != "kvilt"]
    if "kvilt" in engines and peers:
        rows = [
            [f"kvilt / {peer}", *[_ratio(_ours(series, n), series.median(n, peer)) for n in names]] for peer in peers
        ]
        if len(peers) > 1:
            rows.append(["kvilt / best", *[_ratio(_ours(series, n), _best(series, n, peers)) for n in names]])
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def _ours(series: Series, name: str) -> float | None:
    """kvilt's figure for the ratios: without what importing torch costs, where that counts."""
    return series.median(name, "kvilt beyond torch" if name in FRESH else "kvilt")


def _best(series: Series, name: str, peers: list[str]) -> float | None:
    found = [value for peer in peers if (value := series.median(name, peer)) is not None]
    return (min if name in FRESH else max)(found, default=None)


def noise_line(series: Series, busy: float) -> str:
    others = [noise["others"] for noise in series.noise] or [0.0]
    steal = [noise["steal"] for noise in series.noise] or [0.0]
    return (
        f"noise: {busy:.0%} busy before; other processes used {statistics.mean(others):.2f} cores on average, at most "
        f"{max(others):.2f}; the host took {statistics.mean(steal):.2f}, at most {max(steal):.2f}; "
        f"{series.again} samples taken again"
    )


def start(engines: list[Candidate], threads: int) -> dict[str, Server]:
    servers = {}
    for engine in engines:
        try:
            servers[engine.name] = Server(engine, threads)
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
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine")
    parser.add_argument("--json", type=Path, help="write everything here")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    pythons = dict(entry.split("=", 1) for entry in asked.python)
    names, only = chosen(asked.workloads), [name for name in asked.only.split(",") if name]
    engines = candidates(asked.model, only, pythons)
    busy, series = wait_quiet(asked.patience), Series()
    warm = [name for name in names if name not in FRESH]
    servers = start(engines, asked.threads)
    engines = [engine for engine in engines if engine.name in servers]
    try:
        measure_warm(series, servers, warm, asked.rounds)
    finally:
        for server in servers.values():
            server.close()
    measure_fresh(series, engines, [name for name in names if name in FRESH], min(3, asked.rounds), asked.threads)
    title = f"{asked.model}, {asked.threads} threads, medians of {asked.rounds}, {time.strftime('%F %R')}"
    print(f"{title}\n\n{report(series, names, [engine.name for engine in engines])}\n\n{noise_line(series, busy)}")
    if asked.json:
        asked.json.write_text(json.dumps(_record(asked, series, busy), indent=1))


def _record(asked: argparse.Namespace, series: Series, busy: float) -> dict[str, Any]:
    medians = {n: {e: statistics.median(v) for e, v in by.items()} for n, by in series.values.items()}
    about = {"model": asked.model, "threads": asked.threads, "rounds": asked.rounds, "machine": platform.processor()}
    noise = {"busy_before": busy, "samples": series.noise, "taken_again": series.again}
    return {**about, "medians": medians, "samples": series.values, "tokens": series.tokens, "noise": noise}


if __name__ == "__main__":
    main()
