"""Sampling on a GPU: its tokens beside the CPU's, and microseconds of a launch at the size of a Llama 3 vocabulary.

    python bench/gpu_sampling.py

The kernels are timed as a captured graph, and as a whole call of `sample` with all that the host does for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from graph_timer import graph_us
from torch import Tensor

from kvilt.ops.triton.sampling import TritonSampling
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.prepare import prepare
from kvilt.sampling.sampler import SamplingState, sample

VOCAB = 128_256
CASES: dict[str, dict[str, Any]] = {
    "argmax": {},
    "temperature": {"temperature": 0.8},
    "top-p 0.9, top-k 50": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "typical-p 0.9, top-k 50": {"temperature": 0.8, "typical_p": 0.9, "top_k": 50},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "penalties, top-p 0.9, top-k 50": {
        "temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "logit_bias": {7: 1.0},
    },
}  # fmt: skip


def states_of(fields: dict[str, Any], rows: int) -> list[SamplingState]:
    prompt = range(0, 100_000, 100)  # a thousand tokens, all different
    return [SamplingState(SamplingParams.of(seed=row, **fields), prompt) for row in range(rows)]


def logits_of(rows: int, kind: str) -> Tensor:
    """Peaked as a trained model's, or flat as random weights make them: then filters keep most of the vocabulary."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))
    if kind == "flat":
        return logits
    ranks = torch.rand(rows, VOCAB, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return logits * 0.5 - 1.5 * (ranks + 1.0).log()


def check(kernels: TritonSampling) -> None:
    """Tokens of rows with every case, from peaked, flat and rounded logits, beside those of the CPU."""
    for kind in ("peaked", "flat", "rounded"):
        differ = []
        for name, fields in CASES.items():
            if "typical" in name and kind != "peaked":
                continue  # slow to compile
            logits, states = logits_of(4, "flat" if kind == "flat" else "peaked"), states_of(fields, 4)
            if kind == "rounded":
                logits = logits.bfloat16().float()
            expected = sample(logits, states, range(4)).tokens
            made = sample(logits.cuda(), states, range(4), kernels=kernels).tokens
            again = sample(logits.cuda()[1:2], states[1:2], [1], kernels=kernels).tokens
            differ += [(name, made.tolist(), expected.tolist())] if not torch.equal(made, expected) else []
            assert int(again[0]) == int(made[1]), f"{name}: a row alone draws another token"
        print(f"{kind}: {differ or 'tokens are those of the CPU'}", flush=True)


def host_us(work: Callable[[], object], repeat: int = 10) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(kernels: TritonSampling, logits: Tensor, fields: dict[str, Any]) -> str:
    """Microseconds of a launch, of preparing it on the host, and of a whole `sample` that waits."""
    states, positions = states_of(fields, len(logits)), range(len(logits))
    table = prepare(states, positions, VOCAB).table
    table = table and table.to(logits.device)
    launch = graph_us(lambda: kernels.launch(logits, table))
    prepared = host_us(lambda: prepare(states, positions, VOCAB))
    whole = host_us(lambda: sample(logits, states, positions, kernels=kernels))
    return f"{launch:.1f} / {prepared:.0f} / {whole:.0f}"


def measure_all(kernels: TritonSampling) -> None:
    print("us of a launch / of preparing it on the host / of a whole `sample` that waits", flush=True)
    for rows in (1, 64, 256):
        logits = logits_of(rows, "peaked").cuda()
        for name, fields in CASES.items():
            if "typical" not in name:
                print(f"{rows:3} rows, {name}: {measure(kernels, logits, fields)}", flush=True)
        print(f"{rows:3} rows, torch's max: {graph_us(partial(logits.max, dim=-1)):.1f}", flush=True)
        logits = logits_of(rows, "flat").cuda()
        print(f"{rows:3} rows, flat, top-p 0.9: {measure(kernels, logits, CASES['top-p 0.9'])}", flush=True)


def main() -> None:
    kernels = TritonSampling(torch.device("cuda"))
    start = time.perf_counter()
    check(kernels)
    measure_all(kernels)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
