"""The loop that tries inputs, in a process of its own: atheris where it is installed, else the own mutators.

Findings are written as files and the loop goes on. What is tried stands in a shared file, so that the parent can save
it when this process dies or hangs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import mmap
import os
import random
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .mutate import mutated
from .target import Target, bounded_time, limit_memory

COUNT, LENGTH = struct.Struct("<Q"), struct.Struct("<Q")
HEAD_BYTES = COUNT.size + LENGTH.size
_SAVED_OF_A_KIND = 3
OnTry = Callable[[], bool]  # asked after every input: whether to go on


class Board:
    """A file that two processes see: how many inputs were tried, and the one that is being tried."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        size = HEAD_BYTES + most_bytes
        if not path.exists() or path.stat().st_size < size:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def begin(self, count: int, data: bytes) -> None:
        COUNT.pack_into(self._map, 0, count)
        LENGTH.pack_into(self._map, COUNT.size, len(data))
        self._map[HEAD_BYTES : HEAD_BYTES + len(data)] = data

    def count(self) -> int:
        return int(COUNT.unpack_from(self._map, 0)[0])

    def current(self) -> bytes:
        (length,) = LENGTH.unpack_from(self._map, COUNT.size)
        return self._map[HEAD_BYTES : HEAD_BYTES + length]

    def close(self) -> None:
        self._map.close()


class Trial:
    """Tries inputs one after the other, counts what became of them and keeps findings."""

    def __init__(self, target: Target, findings: Path, board: Board | None = None) -> None:
        self.target = target
        self.tried = 0
        self.outcomes: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self._findings = findings
        self._board = board

    def run(self, data: bytes) -> bool:
        """Try one input; whether something new became of it."""
        self.tried += 1
        if self._board is not None:
            self._board.begin(self.tried, data)
        try:
            with bounded_time(len(data)):
                outcome = self.target.check(data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._keep(kind_of(error), data, error)
            return False
        self.outcomes[outcome] += 1
        return self.outcomes[outcome] == 1

    def _keep(self, kind: str, data: bytes, error: BaseException) -> None:
        self.found[kind] += 1
        if self.found[kind] <= _SAVED_OF_A_KIND:
            path = save(self._findings, self.target.name, data)
            print(
                f"FINDING {kind}: {str(error)[:200]}\n  python -m fuzz.{self.target.name} --replay {path}", flush=True
            )
            if self.found[kind] == 1:
                traceback.print_exception(error, limit=-8)


def kind_of(error: BaseException) -> str:
    """One name for findings of one cause: the error and the innermost line of kvilt, or what the oracle says."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/kvilt/" in frame.filename] or list(frames[-1:])
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {place}"


def save(folder: Path, name: str, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return path


def inputs(target: Target, corpus: Path | None) -> list[bytes]:
    """The target's own seeds and the files of a folder, in one order."""
    stored = sorted(path for path in corpus.iterdir() if path.is_file()) if corpus and corpus.is_dir() else []
    return [*target.seeds(), *(path.read_bytes() for path in stored)]


def _changed(target: Target, data: bytes, pool: Sequence[bytes], dice: random.Random, most: int) -> bytes:
    if target.mutate is not None and dice.random() < 1 / 3:
        with suppress(RecursionError):  # a value nested too deeply to be copied is changed as bytes
            return target.mutate(data, dice)[:most]
    return mutated(data, pool, target.words, dice, most)


def search(trial: Trial, start: Sequence[bytes], seed: int, on_try: OnTry) -> None:
    """Mutate inputs until `on_try` says stop; what led to a new outcome is mutated further."""
    dice, target, pool = random.Random(seed), trial.target, list(start)
    for data in start:
        trial.run(data[: target.most_bytes])
        if not on_try():
            return
    while on_try():
        chosen = dice.choice(pool[-20:]) if dice.random() < 0.3 else dice.choice(pool)
        data = _changed(target, chosen, pool, dice, target.most_bytes)
        if trial.run(data) and len(pool) < 4000:
            pool.append(data)


def search_with_atheris(trial: Trial, start: Sequence[bytes], seed: int, corpus: Path, on_try: OnTry) -> None:
    """The same, guided by coverage. Ends the process."""
    import atheris

    dice, target = random.Random(seed), trial.target

    def mutate(data: bytes, most: int, own_seed: int) -> bytes:
        if own_seed % 2:
            return bytes(atheris.Mutate(data, most))
        return _changed(target, data, start, dice, most)

    def check(data: bytes) -> None:
        trial.run(data)
        if not on_try():
            os._exit(0)

    for number, data in enumerate(start):
        (corpus / f"seed-{number:04}").write_bytes(data)
    options = ["fuzz", str(corpus), f"-seed={seed + 1}", f"-max_len={target.most_bytes}"]
    options += ["-rss_limit_mb=0", "-timeout=3600", "-verbosity=0", "-handle_segv=0", "-len_control=0"]
    atheris.Setup(options, check, custom_mutator=mutate, internal_libfuzzer=True)
    atheris.Fuzz()


def import_target(name: str, guided: bool) -> Target:
    """A target by the name of its module; guided by coverage, kvilt is instrumented as it is imported."""
    if not guided:
        return importlib.import_module(f"fuzz.{name}").TARGET
    import atheris

    with atheris.instrument_imports(include=["kvilt"], enable_loader_override=False):
        return importlib.import_module(f"fuzz.{name}").TARGET


def write_stats(path: Path, trial: Trial) -> None:
    """What was tried so far, whole or not at all."""
    stats = {"tried": trial.tried, "outcomes": dict(trial.outcomes.most_common(400)), "found": dict(trial.found)}
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(stats))
    partial.replace(path)


def main() -> None:
    """What the driver starts: see there for the arguments."""
    name, folder, findings, corpus, engine, seconds, runs, seed = sys.argv[1:]
    guided = engine == "atheris"
    target = import_target(name, guided)
    start = [data[: target.most_bytes] for data in inputs(target, Path(corpus))]
    trial = Trial(target, Path(findings), Board(Path(folder) / "board", target.most_bytes))
    limit_memory(target.most_more_memory)
    until_s, said_s = time.monotonic() + float(seconds), time.monotonic()

    def goes_on() -> bool:
        nonlocal said_s
        now_s = time.monotonic()
        if now_s > said_s + 1:
            said_s = now_s
            write_stats(Path(folder) / "stats.json", trial)
        return now_s < until_s and (runs == "0" or trial.tried < int(runs))

    if guided:
        (own := Path(folder) / "corpus").mkdir(exist_ok=True)
        search_with_atheris(trial, start, int(seed), own, goes_on)
    else:
        search(trial, start, int(seed), goes_on)
    write_stats(Path(folder) / "stats.json", trial)


if __name__ == "__main__":
    main()
