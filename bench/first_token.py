"""Seconds from `kvilt run` to the first character on the screen, as a user would count them.

    python bench/first_token.py [--runs 3] [--model smollm2] [--attached]

Beside it: a process that imports torch and nothing else, in turn with the others, and the CPU seconds of both until
then. With `--attached` also the same command while a `kvilt serve` of the same user has the model loaded. The first run
of each is not counted: it compiles what has no bytecode yet, as an installation does. Servers that run already are not
seen: the list of servers is in a folder of its own.
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
from pathlib import Path
from typing import NamedTuple


class Start(NamedTuple):
    """From the start of a process to its first byte of text."""

    wall_s: float
    cpu_s: float


def start(command: list[str]) -> Start:
    """One cold process, until its first byte of text; its end does not count."""
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            sys.exit(f"{' '.join(command)} printed nothing")
        found = Start(time.perf_counter() - started_s, cpu_s(process.pid))
        process.stdout.read()
    return found


def cpu_s(pid: int) -> float:
    """What a process and its threads have computed so far, in ticks of 10 ms; 0 where the system does not say.

    Without the time of the system: that to clear new memory differs by a quarter of a second on virtual machines.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def first_token(model: str) -> Start:
    """`kvilt run`, until the first character of its answer."""
    command = [sys.executable, "-m", "kvilt.cli.main", "run", "Why is the sky blue?", "--model", model]
    return start([*command, "--max-tokens", "4"])


def torch_alone() -> Start:
    """A process that imports torch, until it has."""
    return start([sys.executable, "-c", "import torch; print(torch.__version__, flush=True)"])


@contextmanager
def server(model: str) -> Iterator[None]:
    """A server of this user, from when it is listed as running."""
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


def measure(model: str, runs: int, attached: bool) -> None:
    """Print the medians."""
    pairs = [(torch_alone(), first_token(model)) for _ in range(1 + runs)][1:]
    alone, cold = (Start(*map(statistics.median, zip(*each, strict=True))) for each in zip(*pairs, strict=True))
    own = statistics.median(run.wall_s - torch.wall_s for torch, run in pairs)
    own_cpu = statistics.median(run.cpu_s - torch.cpu_s for torch, run in pairs)
    print(f"kvilt run to first token: {cold.wall_s:.2f} s (median of {runs}), {cold.cpu_s:.2f} CPU s")
    print(f"importing torch alone: {alone.wall_s:.2f} s, {alone.cpu_s:.2f} CPU s")
    share = "" if not alone.cpu_s else f"; {own_cpu:.2f} CPU s, {own_cpu / alone.cpu_s:.0%}"
    print(f"kvilt's own part: {own:.2f} s, {own / alone.wall_s:.0%} of that{share}")
    if attached:
        with server(model):
            found = statistics.median([first_token(model).wall_s for _ in range(1 + runs)][1:])
        print(f"attached to a running server: {found:.3f} s, {cold.wall_s / found:.1f} times sooner")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--attached", action="store_true")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each run would compile all of kvilt again, and none of torch
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        measure(arguments.model, arguments.runs, arguments.attached)


if __name__ == "__main__":
    main()
