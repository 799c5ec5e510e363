"""How fast experts decode beside what the machine can read: a small model of experts with random packed weights.

python bench/experts.py [--format Q4_K] [--threads 2] [--layers 8]

Active bytes are those of the weights that one token reads: attention, router, its experts, and the head. The share is
of the bytes per second that are read from a working set of that size. What a shared machine reads changes from second
to second, so each round measures both, one right after the other, and the median of their ratios counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from random_model import random_checkpoint

from kvilt.config import RunConfig
from kvilt.executor.load import build_executor
from kvilt.executor.protocol import Executor
from kvilt.ops.native.limits import measure
from kvilt.sampling.params import SamplingParams

# The widths of OLMoE and of Qwen3-30B-A3B, with fewer layers and a small vocabulary.
SHAPES = {
    "olmoe": {"hidden_size": 2048, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8},
    "30b-a3b": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
}
ATTENTION = {
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 4096,
    "vocab_size": 16384, "rope_theta": 1e6, "norm_topk_prob": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0)


def step_s(executor: Executor, rows: int, steps: int, runs: int) -> float:
    """Seconds of a decode step, the median of some runs."""
    times = []
    with executor.create_kv_cache(rows) as kv:
        executor.prefill([[1 + i, 2 + i, 3 + i] for i in range(rows)], kv)
        last = [[5 + i] for i in range(rows)]
        executor.sample_tokens(8, last, kv, params=GREEDY)
        for _ in range(runs):
            started_s = time.perf_counter()
            executor.sample_tokens(steps, last, kv, params=GREEDY)
            times.append((time.perf_counter() - started_s) / steps)
    return statistics.median(times)


def beside_reading(executor: Executor, threads: int, size: int) -> tuple[float, float] | None:
    """Bytes per second of reading alone and of decoding right after it, each the best of some tries."""
    limits = measure(threads, size)
    if limits is None:
        return None
    with executor.create_kv_cache() as kv:
        executor.prefill([1, 2, 3], kv)
        executor.sample_tokens(8, [5], kv, params=GREEDY)
        times = []
        for _ in range(8):
            started_s = time.perf_counter()
            executor.sample_tokens(8, [5], kv, params=GREEDY)
            times.append((time.perf_counter() - started_s) / 8)
    return limits.bytes_per_s, size / min(times)


def prefill_s(executor: Executor, tokens: int, runs: int) -> float:
    times = []
    for run in range(runs + 1):
        with executor.create_kv_cache() as kv:
            started_s = time.perf_counter()
            executor.prefill([1 + (7 * i + run) % 16000 for i in range(tokens)], kv)
            times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="olmoe")
    parser.add_argument("--format", default="Q4_K")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=9)
    asked = parser.parse_args()
    shape = SHAPES[asked.shape] | ATTENTION | {"num_hidden_layers": asked.layers}
    checkpoint = random_checkpoint(shape, "cpu", torch.float32, asked.format)
    executor = build_executor(checkpoint, RunConfig(threads=asked.threads, kv_memory=256 << 20, backend="native"))
    size = executor.weight_bytes
    rounds = [one for _ in range(asked.runs) if (one := beside_reading(executor, asked.threads, size)) is not None]
    print(f"{asked.shape}, {asked.layers} layers, {asked.format}, {asked.threads} threads")
    print(f"active bytes {size / 1e6:.0f} MB; GB/s of reading alone and of decoding, round by round:")
    print(", ".join(f"{read / 1e9:.1f} {decode / 1e9:.1f}" for read, decode in rounds))
    share = statistics.median(decode / read for read, decode in rounds)
    one = statistics.median(size / decode for _, decode in rounds)
    print(f"decode: {1 / one:.1f} tokens/s, {size / one / 1e9:.1f} GB/s, {share:.0%} of the limit (medians)")
    eight, prefill = step_s(executor, 8, 32, asked.runs), prefill_s(executor, 512, asked.runs)
    print(f"batch of 8: {8 / eight:.1f} tokens/s; prefill of 512: {512 / prefill:.0f} tokens/s")


if __name__ == "__main__":
    main()
