"""`kvilt serve` beside llama.cpp's server: the same file, the same threads, the same questions, alternately.

    python bench/server_peers.py [--model smollm2-q4_1] [--clients 1,8,32] [--rounds 3] [--threads 2]
                                 [--prompt-tokens 128] [--max-tokens 64] [--workload random] [--json FILE]

Each server is a process of its own, and the client of `kvilt bench serve` asks it in a closed loop. A round asks one
server and then the other the same prompts, which no round before had; the order changes from round to round. The median
over the rounds counts, and only ratios within one run mean something. llama.cpp gets as many slots as clients,
continuous batching, flash attention as it prefers, room for every answer, and a sampler that only takes the best token.

A sample during which other processes used the machine is taken again; rows that stayed disturbed are marked and prove
nothing: llama.cpp's threads wait for each other by spinning, so that it loses many times more than its share.

llama.cpp comes as the package xllamacpp in a virtual environment of its own:

    python -m venv ~/.cache/kvilt-bench/xllama && ~/.cache/kvilt-bench/xllama/bin/pip install xllamacpp
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.models import BENCH, MODELS
from peers.noise import DISTURBED_CORES, Watch, wait_quiet

from kvilt.bench.serve import measure
from kvilt.bench.serve_client import ServerTarget
from kvilt.bench.serve_load import LoadPlan
from kvilt.bench.serve_stats import SLO, LoadSummary, Percentiles, summary

XLLAMA = BENCH / "xllama/bin/python"
GREEDY: Mapping[str, Any] = {"samplers": ["top_k"], "top_k": 1}  # llama.cpp's cheapest way to take the best token
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that runs."""

    name: str
    url: str
    pid: int
    extra: Mapping[str, Any]

    def cpu_s(self) -> float:
        """CPU time it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one server."""

    peer: str
    clients: int
    others: float  # cores that other processes used meanwhile
    result: LoadSummary


@contextmanager
def kvilt_server(model: Path, threads: int, rows: int) -> Iterator[Peer]:
    command = [sys.executable, "-m", "kvilt.cli.main", "serve", "--model", str(model), "--port", "0"]
    command += ["--threads", str(threads), "--max-rows", str(rows), "--log-level", "warning"]
    with running("kvilt", command, " is served at ", {}) as peer:
        yield peer


@contextmanager
def llama_server(model: Path, python: Path, threads: int, slots: int, context: int) -> Iterator[Peer]:
    script = Path(__file__).parent / "peers/llama_http.py"
    command = [str(python), str(script), str(model), *map(str, (threads, slots, context))]
    with running("llama.cpp", command, "LISTENS ", GREEDY) as peer:
        yield peer


@contextmanager
def running(name: str, command: list[str], sign: str, extra: Mapping[str, Any]) -> Iterator[Peer]:
    """A server as a process, from the line that names its address to the end of the block."""
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            yield Peer(name, _address(name, process, Path(log.name), sign), process.pid, extra)
        finally:
            process.terminate()
            process.wait()


def _address(name: str, process: subprocess.Popen[str], log: Path, sign: str) -> str:
    while True:
        text = log.read_text(errors="replace")
        found = [
            line.partition(sign)[2].strip() for line in text.splitlines(keepends=True) if sign in line and "\n" in line
        ]
        if found:
            return found[0]
        try:
            process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
        raise SystemExit(f"{name} does not start: {(text.strip().splitlines() or ['it said nothing'])[-1]}")


def sample(peer: Peer, plan: LoadPlan, chat: bool, retries: int) -> Sample:
    """One round of one server; again, if somebody else used the machine."""
    for left in range(retries, -1, -1):
        watch, used_s = Watch(), peer.cpu_s()
        run = asyncio.run(measure(ServerTarget(peer.url, chat), plan, None, lambda *_: None, peer.extra))
        noise = watch.noise()
        others = max(0.0, noise.others - (peer.cpu_s() - used_s) / noise.seconds)
        taken = Sample(peer.name, plan.clients or 1, others, summary(run.traces, SLO()))
        if taken.result.errors:
            message = next(trace.message for trace in run.traces if trace.error)
            raise SystemExit(f"{peer.name} answered with {taken.result.errors}: {message}")
        if others <= DISTURBED_CORES or not left:
            return taken
        wait_quiet(20)
    raise AssertionError("unreachable")


def rounds(peers: list[Peer], asked: argparse.Namespace, clients: int) -> Iterator[Sample]:
    """The same prompts to every server, in changing order, after a round that does not count."""
    for number in range(asked.rounds + 1):
        plan = LoadPlan(
            workload=asked.workload,
            requests=max(asked.requests, 2 * clients) if number else clients,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=asked.max_tokens,
            clients=clients,
            seed=1000 * clients + number,
        )
        for peer in peers if number % 2 else peers[::-1]:
            _progress(f"{clients} clients, round {number}/{asked.rounds}, {peer.name}")
            taken = sample(peer, plan, asked.chat, asked.retries if number else 0)
            if number:
                yield taken
    _progress("")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)


def report(samples: list[Sample], clients: list[int]) -> None:
    """Medians side by side, and the medians of the rounds' ratios; above 1 is in kvilt's favour."""
    print(f"{'clients':>7} {'tokens/s':>24} {'TTFT p50 ms':>24} {'TTFT p99 ms':>24}   others")
    print(f"{'':>7} " + f"{'kvilt':>8}{'llama':>8}{'ratio':>8} " * 3)
    for count in clients:
        mine = [each.result for each in samples if each.clients == count and each.peer == "kvilt"]
        theirs = [each.result for each in samples if each.clients == count and each.peer != "kvilt"]
        others = max(each.others for each in samples if each.clients == count)
        cells = [
            _cell([each.output_tokens_per_s for each in mine], [each.output_tokens_per_s for each in theirs], True),
            _cell([_first(each).p50 for each in mine], [_first(each).p50 for each in theirs], False),
            _cell([_first(each).p99 for each in mine], [_first(each).p99 for each in theirs], False),
        ]
        mark = " disturbed: take it again on a quiet machine" if others > DISTURBED_CORES else ""
        print(f"{count:>7} {' '.join(cells)}   {others:.2f}{mark}")


def _first(result: LoadSummary) -> Percentiles:
    assert result.ttft_ms is not None  # every request was answered
    return result.ttft_ms


def _cell(mine: list[float], theirs: list[float], more_is_better: bool) -> str:
    ratios = [m / t if more_is_better else t / m for m, t in zip(mine, theirs, strict=True)]
    return f"{statistics.median(mine):>8.1f}{statistics.median(theirs):>8.1f}{statistics.median(ratios):>8.2f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-q4_1", help=f"a .gguf file, or one of {', '.join(MODELS)}")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="a round; two for each client if that is more")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--workload", default="random")
    parser.add_argument("--chat", action="store_true", help="chat instead of completions")
    parser.add_argument("--retries", type=int, default=2, help="of a sample that others disturbed")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine")
    parser.add_argument("--xllama", type=Path, default=XLLAMA, help="the interpreter that has xllamacpp")
    parser.add_argument("--json", type=Path, help="write everything here")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended, too
    model = MODELS.get(asked.model, Path(asked.model))
    clients = [int(count) for count in asked.clients.split(",")]
    for path, advice in ((model, "give a .gguf file"), (asked.xllama, "see the top of this file")):
        if not path.exists():
            raise SystemExit(f"there is no {path}; {advice}")
    turns = 4 if asked.workload == "multi-turn" else 1
    context = 256 * -(-(turns * (2 * asked.prompt_tokens + asked.max_tokens) + 64) // 256)  # with room to spare
    wait_quiet(asked.patience)
    samples: list[Sample] = []
    with kvilt_server(model, asked.threads, max(clients)) as kvilt:
        for count in clients:
            with llama_server(model, asked.xllama, asked.threads, count, context) as llama:
                samples += rounds([kvilt, llama], asked, count)
    print(
        f"{model.name}, {asked.threads} threads, {asked.workload} prompts of about {asked.prompt_tokens} tokens, ",
        end="",
    )
    print(f"{asked.max_tokens} tokens out, {asked.rounds} rounds")
    report(samples, clients)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(each) for each in samples], indent=1))


if __name__ == "__main__":
    main()
