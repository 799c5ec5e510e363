"""Seconds from `kvilt run` to the first character on the screen, as a user would count them.

python bench/first_token.py [--runs 3] [--model smollm2]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def first_token_s(model: str) -> float:
    """One cold process, until its first byte of text."""
    command = [sys.executable, "-m", "kvilt.cli.main", "run", "Why is the sky blue?", "--model", model]
    started_s = time.perf_counter()
    with subprocess.Popen(
        [*command, "--max-tokens", "4"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            sys.exit("kvilt run printed nothing")
        seconds = time.perf_counter() - started_s
        process.stdout.read()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()
    seconds = [first_token_s(arguments.model) for _ in range(arguments.runs)]
    print(f"kvilt run to first token: {statistics.median(seconds):.2f} s (median of {len(seconds)})")


if __name__ == "__main__":
    main()
