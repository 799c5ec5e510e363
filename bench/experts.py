"""How fast experts decode beside what the machine can read: a small model of experts with random packed weights.

python bench/experts.py [--format Q4_K] [--threads 2] [--layers 8]

Active bytes are those of the weights that one token reads: attention, router, its experts, and the head. The share is
of the bytes per second that the same run measures, before and after the model, over a working set of that size.
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
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    shape = SHAPES[asked.shape] | ATTENTION | {"num_hidden_layers": asked.layers}
    checkpoint = random_checkpoint(shape, "cpu", torch.float32, asked.format)
    executor = build_executor(checkpoint, RunConfig(threads=asked.threads, kv_memory=256 << 20, backend="native"))
    size = executor.weight_bytes
    limits = [measure(asked.threads, size)]
    one, eight = step_s(executor, 1, 64, asked.runs), step_s(executor, 8, 32, asked.runs)
    prefill = prefill_s(executor, 512, asked.runs)
    limits.append(measure(asked.threads, size))
    readings = [one.bytes_per_s for one in limits if one is not None]
    read = max(readings)
    print(f"{asked.shape}, {asked.layers} layers, {asked.format}, {asked.threads} threads")
    print(f"active bytes {size / 1e6:.0f} MB; the machine reads {', '.join(f'{r / 1e9:.1f}' for r in readings)} GB/s")
    print(f"decode: {1 / one:.1f} tokens/s, {size / one / 1e9:.1f} GB/s, {size / one / read:.0%} of the limit")
    print(f"batch of 8: {8 / eight:.1f} tokens/s; prefill of 512: {512 / prefill:.0f} tokens/s")


if __name__ == "__main__":
    main()
