"""Change the code a little, many times, and count how often the fast tests notice.

python -m mutation.run [--sample 400] [--seed 18] [--report mutants.jsonl] [--only-survivors mutants.jsonl]

A run that was stopped goes on where it was when it is started again with the same report.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .judge import Judge, RecordedTest
from .operators import Mutant, diff, mutants, unchanged

ROOT = Path(__file__).parents[1]
TARGETS = (
    *("kvilt/kv/*.py", "kvilt/executor/*.py", "kvilt/engine/scheduling/*.py", "kvilt/compat/*.py"),
    "kvilt/store/record.py",
)
TESTS = (
    *("tests/kv/test_*.py", "tests/executor/test_*.py", "tests/contracts/test_*.py", "tests/engine/test_*.py"),
    *("tests/store/test_*.py", "tests/blend/test_*.py", "tests/speculative/test_*.py", "tests/test_*.py"),
    "tests/models/test_adapters.py",
)
EQUIVALENT = Path(__file__).with_name("equivalent.toml")  # reviewed by hand: no test can tell these from the original

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=400)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--report", type=Path, default=Path("mutants.jsonl"), help="a line of JSON for each mutant")
    parser.add_argument("--only-survivors", type=Path, metavar="REPORT", help="only those that survived in this report")
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests for each mutant, as recorded")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    os.chdir(ROOT)
    sample = sampled(files(TARGETS), asked.seed, asked.sample)
    if asked.only_survivors:
        survived = {one["key"] for one in read(asked.only_survivors) if one["status"] != "killed"}
        sample = [mutant for mutant in sample if mutant.key in survived]
    done = {one["key"] for one in read(asked.report)}
    todo = [mutant for mutant in sample if mutant.key not in done]
    tests, modules = recorded()
    preload(modules)
    judge, keys = Judge(tests, asked.seconds), {mutant.key for mutant in sample}
    in_parallel([todo[first :: asked.jobs] for first in range(asked.jobs)], judge, asked.report)
    records = [one for one in read(asked.report) if one["key"] in keys]
    print(summary(records))
    if flaky := judge.fails_alone({one["by"] for one in records if one["status"] == "killed"}):
        sys.exit(f"{flaky} fails on the unmutated code too: what it killed does not count")


def files(patterns: Iterable[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in Path().glob(pattern))


def sampled(sources: list[Path], seed: int, size: int) -> list[Mutant]:
    """Drawn by a hash of what each mutant is: a change of the code elsewhere leaves the sample as it was."""
    everything = [mutant for path in sources for mutant in mutants(path.read_text(), str(path))]
    everything.sort(key=lambda mutant: hashlib.sha256(f"{seed}|{mutant.key}".encode()).digest())
    chosen: list[Mutant] = []
    for mutant in everything:
        if len(chosen) < size and not unchanged(Path(mutant.file).read_text(), mutant):
            chosen.append(mutant)
    return chosen


def recorded() -> tuple[list[RecordedTest], list[str]]:
    """Which test runs which lines. Kept outside the repository; test files that changed are recorded again."""
    sources = {str(path): path.read_text() for path in files(TARGETS)}
    kept = Path(tempfile.gettempdir()) / f"kvilt-mutation-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:16]}.json"
    empty: Record = {"digests": {}, "tests": {}, "modules": [], "sources": {}}
    record: Record = json.loads(kept.read_text()) if kept.exists() else empty
    follow_moved_lines(record, sources)
    digests = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files(TESTS)}
    changed = [path for path, digest in digests.items() if record["digests"].get(path) != digest]
    if changed:
        print(f"recording which lines {len(changed)} test files run", flush=True)
        new = record_tests(changed, sources)
        same = {at: test for at, test in record["tests"].items() if at.split("::")[0] in digests.keys() - set(changed)}
        modules = sorted({*record["modules"], *new["modules"]})
        record |= {"digests": digests, "tests": same | new["tests"], "modules": modules}
    kept.write_text(json.dumps(record | {"sources": sources}))
    tests = [RecordedTest(at, test["seconds"], _frozen(test["lines"])) for at, test in record["tests"].items()]
    return tests, record["modules"]


def record_tests(test_files: Iterable[str], sources: Iterable[str]) -> Record:
    """Run test files under the recorder, in a process of its own."""
    with tempfile.NamedTemporaryFile() as result:
        command = [sys.executable, "-m", "mutation.record", result.name, *sources, "--", *test_files]
        subprocess.run(command, check=True)
        found: Record = json.loads(Path(result.name).read_text())
    for test in found["tests"].values():
        test["lines"] = {str(Path(file).relative_to(ROOT)): numbers for file, numbers in test["lines"].items()}
    return found


def follow_moved_lines(record: Record, sources: dict[str, str]) -> None:
    """Where the code changed since it was recorded, give each line the tests of the line that it comes from."""
    for file, text in sources.items():
        before = record["sources"].get(file, text)
        if before == text:
            continue
        came_from = origins(before.splitlines(), text.splitlines())
        for test in record["tests"].values():
            ran = set(test["lines"].get(file, ()))
            test["lines"][file] = [line for line, origin in enumerate(came_from, 1) if origin in ran]


def origins(before: list[str], after: list[str]) -> list[int]:
    """For each line the number of the one that it was; a new line has that of the line before it."""
    found: list[int] = []
    for _, first, stop, start, end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        found += [min(first + n, stop - 1) + 1 for n in range(end - start)]
    return found


def _frozen(lines: dict[str, list[int]]) -> dict[str, frozenset[int]]:
    return {file: frozenset(numbers) for file, numbers in lines.items() if numbers}


def preload(modules: Iterable[str]) -> None:
    """Import all that is not ours once: torch and transformers take seconds, and every mutant needs a new process."""
    os.environ["TRITON_INTERPRET"] = "1"  # as tests/interpreted.py does, before triton is imported
    import torch

    torch.set_num_threads(1)  # a process with threads cannot be forked
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"not preloaded: {name}: {error}", flush=True)


def in_parallel(shares: list[list[Mutant]], judge: Judge, report: Path) -> None:
    """One process for each share; all append to the same report."""
    workers = []
    for number, share in enumerate(shares):
        if (worker := os.fork()) == 0:
            for at, mutant in enumerate(share):
                start = time.monotonic()
                status, by = judge.judge(mutant)
                seconds = round(time.monotonic() - start, 1)
                write(report, mutant, status, by, seconds)
                print(f"[{number}] {at + 1}/{len(share)} {status} {seconds}s {mutant.key[:90]!r} {by}", flush=True)
            os._exit(0)
        workers.append(worker)
    for worker in workers:
        os.waitpid(worker, 0)


def write(report: Path, mutant: Mutant, status: str, by: str, seconds: float) -> None:
    record = {"key": mutant.key, "file": mutant.file, "line": mutant.line, "operator": mutant.operator}
    record |= {"status": status, "by": by, "seconds": seconds, "diff": diff(Path(mutant.file).read_text(), mutant)}
    with report.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def read(report: Path) -> list[Record]:
    """The last verdict on each mutant."""
    lines = report.read_text().splitlines() if report.exists() else []
    return list({one["key"]: one for one in map(json.loads, lines)}.values())


def summary(records: list[Record]) -> str:
    """Killed of all, by package; and without the mutants that are known to change nothing."""
    equal = {one["key"] for one in tomllib.loads(EQUIVALENT.read_text())["mutant"]} if EQUIVALENT.exists() else set()
    counts: dict[str, Counter[str]] = {}
    for one in records:
        status = "equivalent" if one["status"] != "killed" and one["key"] in equal else one["status"]
        for package in (str(Path(one["file"]).parent), "all"):
            counts.setdefault(package, Counter())[status] += 1
    lines = ["| package | mutants | killed | equivalent | score | without equivalent |", "|---|---|---|---|---|---|"]
    for package, count in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        total, killed = count.total(), count["killed"]
        score, rest = killed / total, killed / max(1, total - count["equivalent"])
        lines.append(f"| {package} | {total} | {killed} | {count['equivalent']} | {score:.1%} | {rest:.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
