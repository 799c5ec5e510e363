"""All fuzzers one after the other, and the table of what they did.

python -m fuzz.all [--minutes 30] [--seed 1] [--only gguf notes] [--engine auto|atheris|own] [--findings DIR]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from .driver import HERE, Sum, fuzz
from .worker import import_target

TARGETS = ("gguf", "safetensors", "blobs", "records", "notes", "bodies", "templates", "grammars", "http_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="for each")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=TARGETS, metavar="NAME")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--findings", type=Path, default=HERE / "findings")
    parser.add_argument("--engine", choices=("auto", "atheris", "own"), default="auto")
    asked = parser.parse_args()
    if asked.engine == "auto":
        asked.engine = "atheris" if importlib.util.find_spec("atheris") else "own"
    asked.runs = 0
    sums: dict[str, Sum] = {}
    for name in asked.only:
        asked.corpus = HERE / "corpus" / name
        sums[name] = fuzz(import_target(name, guided=False), asked)
        print(sums[name].line(name, asked.engine), flush=True)
    print(table(sums))
    sys.exit(1 if any(one.found for one in sums.values()) else 0)


def table(sums: dict[str, Sum]) -> str:
    """For the documents."""
    lines = ["| target | seconds | inputs | findings |", "|---|---|---|---|"]
    for name, one in sums.items():
        lines.append(f"| `{name}` | {one.seconds:,.0f} | {one.tried:,} | {one.found.total() or 'none'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
