"""Seconds from `kvilt run` to the first character on the screen, as a user would count them.

    python bench/first_token.py [--runs 3] [--model smollm2] [--attached]

Beside it: a process that imports torch and nothing else, in turn with the others. With `--attached` also the same
command while a `kvilt serve` of the same user has the model loaded. The first run of each is not counted: it compiles
what has no bytecode yet, as an installation does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager


def first_byte_s(command: list[str]) -> float:
    """One cold process, until its first byte of text; its end does not count."""
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            sys.exit(f"{' '.join(command)} printed nothing")
        seconds = time.perf_counter() - started_s
        process.stdout.read()
    return seconds


def first_token_s(model: str, *options: str) -> float:
    """`kvilt run`, until the first character of its answer."""
    command = [sys.executable, "-m", "kvilt.cli.main", "run", "Why is the sky blue?", "--model", model, *options]
    return first_byte_s([*command, "--max-tokens", "4"])


def torch_s() -> float:
    """A process that imports torch, until it has."""
    return first_byte_s([sys.executable, "-c", "import torch; print(torch.__version__, flush=True)"])


@contextmanager
def server(model: str) -> Iterator[None]:
    """A server of this user, in a folder of its own, from when it is listed as running."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        command = [sys.executable, "-m", "kvilt.cli.main", "serve", "--model", model, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            from kvilt.server.running import running_servers

            while not running_servers():
                if process.poll() is not None:
                    sys.exit("kvilt serve ended")
                time.sleep(0.2)
            try:
                yield
            finally:
                process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--attached", action="store_true")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each run would compile all of kvilt again, and none of torch
    pairs = [(torch_s(), first_token_s(arguments.model, "--no-attach")) for _ in range(1 + arguments.runs)][1:]
    torch_alone, cold = (statistics.median(times) for times in zip(*pairs, strict=True))
    own = statistics.median(run - alone for alone, run in pairs)
    print(f"kvilt run to first token: {cold:.2f} s (median of {arguments.runs})")
    print(f"importing torch alone: {torch_alone:.2f} s; kvilt's own part: {own:.2f} s, {own / torch_alone:.0%} of that")
    if arguments.attached:
        with server(arguments.model):
            first_token_s(arguments.model)
            attached = statistics.median(first_token_s(arguments.model) for _ in range(arguments.runs))
        print(f"attached to a running server: {attached:.2f} s, {cold / attached:.1f} times sooner")


if __name__ == "__main__":
    main()
