"""Builds of kvilt's kernels beside each other: how many times as fast as the first one each of them is.

    python bench/cpu_builds.py old/*.so new/*.so [MORE.so ...] [--model smollm2-q4_1] [--workloads batch:8,decode:16]
                               [--rounds 15] [--starts 2] [--threads 2]

Shared machines change their speed by a fifth within minutes, so two runs cannot show a gain of 5 %. Here all builds are
loaded at once and take samples in turn, in the opposite order every other round, and the ratio is the median over the
rounds. A process keeps the memory it got at its start, lucky or not: --starts begins all of them anew. The same file
given twice shows how far a build is from itself. Columns are named after the folders of the files. Workloads are those
of cpu_peers.py.

    cmake -S csrc -B build -G Ninja && ninja -C build && mkdir old && cp build/_kvilt_native*.so old/
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from peers.children import Missing, Server
from peers.engines import NATIVE
from peers.models import MODELS, Candidate
from peers.workloads import chosen, parse

Rates = dict[str, list[list[float]]]  # by workload, of each build


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "builds", nargs="+", type=Path, help="files of the extension; the first is what others are compared with"
    )
    parser.add_argument("--model", default="smollm2-q4_1", help=f"{', '.join(MODELS)}, or a file or folder of weights")
    parser.add_argument("--workloads", default="prefill:512,decode:16,batch:8,batch:32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    for build in asked.builds:
        if not build.is_file():
            parser.error(f"there is no file {build}; build csrc with cmake and copy its _kvilt_native*.so")
    return asked


def start(build: Path, model: str, threads: int) -> Server:
    os.environ[NATIVE] = str(build.resolve())
    try:
        return Server(Candidate("kvilt", "kvilt", MODELS.get(model, Path(model)), sys.executable), threads)
    except Missing as error:
        raise SystemExit(f"{build} cannot be measured: {error}") from None


def measure(servers: list[Server], names: list[str], rounds: int, rates: Rates) -> None:
    for name in names:
        of = rates.setdefault(name, [[] for _ in servers])
        for turn in range(rounds):
            if sys.stderr.isatty():
                print(f"\r{name} {turn + 1}/{rounds}   ", end="", file=sys.stderr, flush=True)
            order = range(len(servers)) if turn % 2 == 0 else reversed(range(len(servers)))
            for at in order:
                of[at].append(servers[at].ask(parse(name))["rate"])


def main() -> None:
    asked = arguments()
    names = chosen(asked.workloads)
    rates: Rates = {}
    for _ in range(asked.starts):
        servers = [start(build, asked.model, asked.threads) for build in asked.builds]
        measure(servers, names, asked.rounds, rates)
        for server in servers:
            server.close()
    print(f"\n{'tokens/s':<14}" + "".join(f"{build.parent.name:>20}" for build in asked.builds))
    for name, builds in rates.items():
        print(f"{name:<14}" + "".join(f"{shown(build, builds[0]):>20}" for build in builds))


def shown(rates: list[float], first: list[float]) -> str:
    ratio = statistics.median(a / b for a, b in zip(rates, first, strict=True))
    return f"{statistics.median(rates):.1f} ({ratio:.3f}x)"


if __name__ == "__main__":
    main()
