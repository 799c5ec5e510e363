"""`kvilt cluster up` and `down` as a user types them, for the tests on Ray."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from absent import skip_without

import kvilt

ROOT = Path(kvilt.__file__).parents[1]
PATIENCE_S = 600.0


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}


@contextmanager
def cluster_up(log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """A cluster of replicas with one thread each, at any free ports: its process, and the addresses of its doors."""
    if importlib.util.find_spec("ray") is None:
        skip_without("ray")
    command = [sys.executable, "-m", "kvilt", "cluster", "up", "--port", "0", "--threads", "1", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment())
        try:
            until = time.monotonic() + PATIENCE_S
            while (found := re.search(r"served at (.+)\n", log.read_text())) is None:
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            yield process, found[1].split(" and ")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def cluster_down(process: subprocess.Popen[bytes]) -> None:
    """`kvilt cluster down` ends the process of `up`."""
    down = [sys.executable, "-m", "kvilt", "cluster", "down"]
    subprocess.run(down, env=_environment(), timeout=PATIENCE_S, check=True)
    assert process.wait(PATIENCE_S) == 0
