"""The command line of every fuzzer: starts a worker, watches it, saves what kills or hangs it, prints the sum.

    python -m fuzz.gguf --minutes 30 [--seed 1] [--runs 0] [--corpus DIR] [--findings DIR] [--engine auto|atheris|own]
    python -m fuzz.gguf --replay FILE...

Exit status 1 means that there was a finding.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .target import Target
from .worker import Board, Trial, save

HERE = Path(__file__).parent
HANG_S = 180.0  # without a new input: the worker hangs where no signal reaches it
_PROGRESS_S = 60.0


@dataclass
class Sum:
    """What all workers of a run did together."""

    tried: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)

    def add(self, stats: dict[str, Any]) -> None:
        self.outcomes.update(stats["outcomes"])
        self.found.update(stats["found"])

    def line(self, name: str, engine: str) -> str:
        findings = ", ".join(f"{count}x {kind}" for kind, count in self.found.items()) or "none"
        return (
            f"{name}: {self.tried:,} inputs in {self.seconds:.0f} s ({engine}), "
            f"{len(self.outcomes)} outcomes, findings: {findings}"
        )


def main(target: Target) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--runs", type=int, default=0, help="end after so many inputs; 0: when the time is over")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus" / target.name, help="more inputs to begin with")
    parser.add_argument("--findings", type=Path, default=HERE / "findings", help="where findings are written")
    parser.add_argument("--engine", choices=("auto", "atheris", "own"), default="auto")
    parser.add_argument("--replay", type=Path, nargs="+", help="try these files and nothing else")
    parser.add_argument("--outcomes", action="store_true", help="print what became of the inputs")
    asked = parser.parse_args()
    if asked.replay:
        sys.exit(replay(target, asked.replay, asked.findings))
    if asked.engine == "auto":
        asked.engine = "atheris" if importlib.util.find_spec("atheris") else "own"
    done = fuzz(target, asked)
    if asked.outcomes:
        print("\n".join(f"{count:>9} {outcome}" for outcome, count in done.outcomes.most_common()))
    print(done.line(target.name, asked.engine), flush=True)
    sys.exit(1 if done.found else 0)


def replay(target: Target, files: list[Path], findings: Path) -> int:
    """Try saved inputs again, in this process."""
    trial = Trial(target, findings)
    for path in files:
        trial.run(path.read_bytes())
        print(f"{path.name}: {', '.join([*trial.outcomes, *trial.found])}")
    return 1 if trial.found else 0


def fuzz(target: Target, asked: argparse.Namespace) -> Sum:
    """Workers one after the other until the time is over: one that dies is followed by the next."""
    done, began_s = Sum(), time.monotonic()
    until_s = began_s + 60 * asked.minutes
    seed = asked.seed
    while (left_s := until_s - time.monotonic()) > 1 and (not asked.runs or done.tried < asked.runs):
        before = done.tried
        with tempfile.TemporaryDirectory(prefix=f"fuzz-{target.name}-") as folder:
            _work(target, asked, Path(folder), left_s, seed, done)
        if done.tried == before:
            break  # it dies before its first input, and so would the next
        seed += 1000
    done.seconds = time.monotonic() - began_s
    return done


def _work(target: Target, asked: argparse.Namespace, folder: Path, left_s: float, seed: int, done: Sum) -> None:
    """One worker from beginning to end."""
    board = Board(folder / "board", target.most_bytes)
    runs = max(0, asked.runs - done.tried)
    options = [folder, asked.findings, asked.corpus, asked.engine, left_s, runs, seed]
    worker = subprocess.Popen(
        [sys.executable, "-m", "fuzz.worker", target.name, *map(str, options)], cwd=HERE.parent, stderr=None
    )
    try:
        why = _watch(worker, board, target.name, left_s)
    finally:
        worker.kill()
        worker.wait()
    done.tried += board.count()
    stats = folder / "stats.json"
    if stats.exists():
        done.add(json.loads(stats.read_text()))
    if why:
        done.found[why] += 1
        path = save(asked.findings, target.name, board.current())
        print(f"FINDING {why}\n  python -m fuzz.{target.name} --replay {path}", flush=True)
    board.close()


def _watch(worker: subprocess.Popen[bytes], board: Board, name: str, left_s: float) -> str | None:
    """Wait for the end; why it was not a good one."""
    count, moved_s = 0, time.monotonic()
    began_s = said_s = moved_s
    while True:
        try:
            status = worker.wait(timeout=1)
            return None if status == 0 else f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            now_s = time.monotonic()
        if board.count() != count:
            count, moved_s = board.count(), now_s
        if now_s - moved_s > HANG_S and count:
            return f"no end after {HANG_S:.0f} s"
        if now_s - began_s > left_s + HANG_S:
            return None
        if now_s - said_s > _PROGRESS_S:
            said_s = now_s
            print(f"{name}: {count:,} inputs, {count / (now_s - began_s):.0f}/s, {left_s - now_s + began_s:.0f} s left")
