"""One runtime in a process of its own; the driver starts it with the interpreter of that runtime.

    python -m peers.worker serve ENGINE MODEL THREADS             requests on stdin, answers on stdout, one JSON a line
    python -m peers.worker once ENGINE MODEL THREADS PROMPT NEW   load, generate, report when and how much memory
    python -m peers.worker long ENGINE MODEL THREADS PROMPT NEW   load, generate, report the seconds of both parts
    python -m peers.worker torch                                  import torch, report the same
    python -m peers.worker limits THREADS BYTES                   what the machine can do, by kvilt's extension

Runtimes print to stdout as they like; answers are the lines that begin with RESULT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from .engines import ENGINES, NATIVE, Engine, use_extension
from .memory import status_bytes
from .noise import RETRIES, Watch, wait_quiet
from .workloads import Workload, prompts

WARM_S = 0.6


def answer(result: dict[str, Any]) -> None:
    print("RESULT " + json.dumps(result), flush=True)


def warm_up(engine: Engine, rows: int) -> None:
    """Wake threads, bring the weights near, and let the host put two virtual cores on two real ones, which takes it
    some tenths of a second of load."""
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < WARM_S:
        engine.generate(prompts(rows, 16), 4)


def sample(engine: Engine, workload: Workload) -> dict[str, Any]:
    """One undisturbed sample, if the machine lets us have one."""
    rows = prompts(workload.rows, workload.prompt)
    tries = 0
    while True:
        warm_up(engine, workload.rows)
        watch = Watch()
        timing = engine.generate(rows, workload.new)
        noise = watch.noise()
        tries += 1
        if not noise.disturbed or tries > RETRIES:
            break
        wait_quiet(patience_s=10)
    lengths = {len(tokens) for tokens in timing.tokens}
    if lengths != {workload.new}:
        raise RuntimeError(f"{lengths} new tokens instead of {workload.new}")
    rate = workload.rate(timing.first_s, timing.total_s)
    about = {"noise": asdict(noise), "disturbed": noise.disturbed, "tries": tries}
    return {"rate": rate, "tokens": timing.tokens[0][:16], **about}


def serve(name: str, model: str, threads: int) -> None:
    engine = ENGINES[name](model, threads)
    answer({"about": getattr(engine, "about", model)})
    seen = set()
    for line in sys.stdin:
        workload = Workload(**json.loads(line))
        try:
            if workload not in seen:
                engine.generate(prompts(workload.rows, workload.prompt), min(workload.new, 4))
                seen.add(workload)
            answer(sample(engine, workload))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def once(name: str, model: str, threads: int, prompt: int, new: int) -> None:
    engine = ENGINES[name](model, threads)
    loaded = time.time()
    timing = engine.generate(prompts(1, prompt), new)
    answer({"loaded": loaded, "first": loaded + timing.first_s, "peak_bytes": status_bytes("VmHWM")})
    sys.stdout.flush()
    os._exit(0)  # some runtimes crash on their way out


def long(name: str, model: str, threads: int, prompt: int, new: int) -> None:
    engine = ENGINES[name](model, threads)
    warm_up(engine, 1)
    watch = Watch()
    timing = engine.generate(prompts(1, prompt), new)
    noise = watch.noise()
    answer({"first_s": timing.first_s, "total_s": timing.total_s, "disturbed": noise.disturbed, "noise": asdict(noise)})
    sys.stdout.flush()
    os._exit(0)


def torch_alone() -> None:
    import torch  # noqa: F401

    answer({"first": time.time(), "peak_bytes": status_bytes("VmHWM")})


def machine(threads: int, size: int) -> None:
    if native := os.environ.get(NATIVE):
        use_extension(native)
    from kvilt.ops.native.limits import measure

    found = measure(threads, size)
    answer({"limits": None if found is None else asdict(found)})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", name, model, threads]:
            serve(name, model, int(threads))
        case ["once", name, model, threads, prompt, new]:
            once(name, model, int(threads), int(prompt), int(new))
        case ["long", name, model, threads, prompt, new]:
            long(name, model, int(threads), int(prompt), int(new))
        case ["torch"]:
            torch_alone()
        case ["limits", threads, size]:
            machine(int(threads), int(size))
        case _:
            raise SystemExit(__doc__)
