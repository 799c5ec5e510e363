"""Cold start for `kvilt bench`: a fresh process loads a model; measures the time to first token and peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from ..errors import KviltError

PROMPT, LONG_PROMPT, NEW = 16, 1024, 64

# Importing kvilt imports torch too, so the cost of torch is measured before. Peaks are read from /proc: the peak of
# getrusage would include that of the parent process.
_BOOT = """
import sys
def say(place):
    peak = 0
    try:
        with open("/proc/self/status") as status:
            peak = next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    except OSError:
        pass
    print(place, peak, flush=True)
import torch
say("torch")
from kvilt.bench.cold_start import start
start(sys.argv[1], sys.argv[2], say)
"""


class ColdStartFailed(KviltError):
    """The fresh process of a benchmark ended early."""

    def __init__(self, said: str) -> None:
        super().__init__(f"the cold start failed: {said}; leave it out with --no-cold")


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Seconds since the process started, and its peaks of resident memory (0 where the system does not say)."""

    torch_s: float  # torch is imported
    first_token_s: float
    torch_bytes: int
    peak_bytes: int  # after a long prompt


def measure_cold_start(model: str, config: dict[str, Any]) -> ColdStart:
    """Start a process, measure its first token, and its peak memory with a long prompt."""
    command = [sys.executable, "-c", _BOOT, model, json.dumps(config)]
    arrived: dict[str, tuple[float, int]] = {}
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            place, size = line.split()
            arrived[place] = (time.perf_counter() - started_s, int(size))
        said = process.stderr.read().strip().splitlines()
    if "done" not in arrived:
        raise ColdStartFailed(said[-1] if said else f"its process ended with {process.returncode}")
    (torch_s, torch_bytes), (first_s, _), (_, peak_bytes) = (arrived[place] for place in ("torch", "first", "done"))
    return ColdStart(torch_s, first_s, torch_bytes, peak_bytes)


def start(model: str, config: str, say: Any) -> None:
    """The work of the fresh process; `say` reports each stage to the parent."""
    from ..llm import load
    from .throughput import arbitrary_ids

    with load(model, **json.loads(config)) as llm:
        executor = llm.executor
        with executor.create_kv_cache() as kv:
            executor.sample_tokens(1, arbitrary_ids(executor, PROMPT), kv)
        say("first")
        with executor.create_kv_cache() as kv:
            prompt = max(1, min(LONG_PROMPT, kv.capacity - NEW))
            executor.sample_tokens(NEW, arbitrary_ids(executor, prompt), kv)
        say("done")
