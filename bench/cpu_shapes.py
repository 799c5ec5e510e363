"""Models of any shape with random weights on the CPU: prefill, decode and batches by instruction set, alternately.

    python bench/cpu_shapes.py [--shape 8b] [--format Q4_0] [--isa amx avx512] [--threads 16] [--rounds 3]
        [--vocabulary 49152] [--layers 32] [--workloads prefill:512 decode decode:8192 batch:8 batch:32]

`decode:N` is one row behind N tokens, `batch:N` are N rows. Only ratios within one run mean something. The machine's
limits are measured by the same program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import _kvilt_native
import torch
from random_model import LLAMA_1B, LLAMA_8B, QWEN3_06B, QWEN3_30B_A3B, SMALL, RandomTensors, random_checkpoint

from kvilt.batch import Batch, Ids, Last, Row
from kvilt.config import RunConfig
from kvilt.executor.load import build_executor
from kvilt.executor.protocol import Executor
from kvilt.ops.native.backend import NativeOps
from kvilt.quant.tensor import Weight
from kvilt.sampling.params import SamplingParams

SHAPES = {"8b": LLAMA_8B, "1b": LLAMA_1B, "0.6b": QWEN3_06B, "30b-a3b": QWEN3_30B_A3B, "small": SMALL}
GREEDY = SamplingParams(temperature=0.0)
STEPS = 24


class RepeatedTensors(RandomTensors):
    """The same numbers for all tensors of a shape: making new ones for each would take longer than the measurement."""

    def _made(self, name: str) -> Weight:
        made: dict[tuple[int, ...], Weight] = self.__dict__.setdefault("made", {})
        shape = self.shapes[name]
        if shape not in made:
            made[shape] = super()._made(name)
        return made[shape]


def executor_of(asked: argparse.Namespace, isa: str) -> Executor:
    shape: dict[str, Any] = {**SHAPES[asked.shape], "vocab_size": asked.vocabulary}
    if asked.layers:
        shape["num_hidden_layers"] = asked.layers
    checkpoint = random_checkpoint(shape, "cpu", torch.float32, asked.format)
    own = checkpoint.tensors
    assert isinstance(own, RandomTensors)
    repeated = RepeatedTensors(own.shapes, own.device, own.dtype, own.format)
    object.__setattr__(checkpoint, "tensors", repeated)
    longest = max(4096, *(size_of(name) + 2 * STEPS for name in asked.workloads))
    dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    token_bytes = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * dim
    config = RunConfig(threads=asked.threads, kv_memory=(1 << 30) + token_bytes * longest, max_context=longest)
    return build_executor(checkpoint, config, ops=NativeOps(asked.threads, isa))


def prefill(executor: Executor, tokens: int) -> float:
    ids = [1 + i % 900 for i in range(tokens)]
    with executor.create_kv_cache() as kv:
        kv.reserve(tokens)
        started_s = time.perf_counter()
        executor.run(Batch.of([Row(Ids(ids), range(tokens), kv, want=Last(1))]))
        return tokens / (time.perf_counter() - started_s)


def decode(executor: Executor, rows: int, context: int) -> float:
    with executor.create_kv_cache(rows) as kv:
        executor.prefill([[1 + (7 * i + 13 * row) % 900 for i in range(context)] for row in range(rows)], kv)
        last = [[5 + row] for row in range(rows)]
        executor.sample_tokens(2, last, kv, params=GREEDY)
        started_s = time.perf_counter()
        executor.sample_tokens(STEPS, last, kv, params=GREEDY)
        return rows * STEPS / (time.perf_counter() - started_s)


SIZES = {"prefill": 512, "decode": 16, "batch": 8}  # where a workload names none


def size_of(name: str) -> int:
    kind, _, size = name.partition(":")
    if kind not in SIZES or not (size or "1").isdecimal():
        raise SystemExit(f"cannot read the workload {name!r}; write prefill:N, decode:N or batch:N")
    return int(size or SIZES[kind])


def measure(executor: Executor, name: str) -> float:
    size = size_of(name)
    if name.startswith("prefill"):
        return prefill(executor, size)
    return decode(executor, size, 16) if name.startswith("batch") else decode(executor, 1, size)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--format", default="Q4_0")
    parser.add_argument("--isa", nargs="*", default=_kvilt_native.available_isas()[:2])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has")
    parser.add_argument("--workloads", nargs="*", default=["prefill:512", "decode", "batch:8", "batch:32"])
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    for name in asked.workloads:
        size_of(name)  # refuses a name before models are made
    read, multiplied = _kvilt_native.limits(asked.threads, 1 << 30)
    print(
        f"limits: {read / 1e9:.0f} GB/s read, {multiplied / 1e9:.0f} GOP/s by vectors of int8, {asked.threads} threads"
    )
    executors = {isa: executor_of(asked, isa) for isa in asked.isa}
    print(f"{asked.shape} in {asked.format}, {next(iter(executors.values())).weight_bytes / 1e9:.2f} GB of weights")
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(asked.rounds + 1):
        for name in asked.workloads:
            for isa, executor in executors.items():
                rate = measure(executor, name)
                if turn:  # the first one warms up
                    rates.setdefault((name, isa), []).append(rate)
    print(f"{'tokens/s':<14}" + "".join(f"{isa:>14}" for isa in executors))
    for name in asked.workloads:
        print(f"{name:<14}" + "".join(f"{statistics.median(rates[name, isa]):>14.1f}" for isa in executors))


if __name__ == "__main__":
    main()
