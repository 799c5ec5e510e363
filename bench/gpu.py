"""What a GPU is used for, beside what it could do: decode, batches and prefill of a Llama shape with random weights.

    python bench/gpu.py [--shape 8b] [--only decode,batch,prefill]

Limits (bytes a second read, operations a second) are measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from random_model import LLAMA_1B, LLAMA_8B, SMALL, random_checkpoint

from kvilt.batch import Batch, Ids, Nothing, Row
from kvilt.config import RunConfig
from kvilt.executor.load import build_executor
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams

SHAPES = {"8b": LLAMA_8B, "1b": LLAMA_1B, "small": SMALL}
GREEDY = SamplingParams(temperature=0.0)


def median_s(work: Callable[[], Any], repeat: int = 5) -> float:
    """Seconds of one call, the device waited for."""
    times = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def limits() -> tuple[float, float]:
    """Bytes read and bf16 operations, a second."""
    data = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    words = data.view(torch.int32)
    read = data.nbytes / median_s(lambda: words.max(), 10)
    target = torch.empty_like(data)
    copied = 2 * data.nbytes / median_s(lambda: target.copy_(data), 10)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    made = 2 * 8192**3 / median_s(lambda: a @ b, 10)
    print(f"limits: read {read / 1e12:.2f} TB/s, copy {copied / 1e12:.2f} TB/s, bf16 {made / 1e12:.0f} TFLOP/s")
    return max(read, copied), made


def decode(executor: Executor, bandwidth: float) -> None:
    """One sequence, greedy, through `sample_tokens`."""
    with executor.create_kv_cache() as kv:
        executor.prefill(list(range(1, 17)), kv)
        executor.sample_tokens(40, [5], kv, params=GREEDY)
        seconds = median_s(lambda: executor.sample_tokens(128, [7], kv, params=GREEDY)) / 128
    share = executor.weight_bytes / bandwidth / seconds
    print(f"decode, batch 1: {1 / seconds:.0f} tok/s, {seconds * 1e3:.3f} ms a step, {share:.0%} of bandwidth")


def batch(executor: Executor, bandwidth: float, rows: int, context: int) -> None:
    """Many sequences in one step."""
    with executor.create_kv_cache(rows) as kv:
        prompt = [1 + i % 900 for i in range(context)]
        executor.prefill([prompt] * rows, kv)
        executor.sample_tokens(40, [[5]] * rows, kv, params=GREEDY)
        steps = 32
        seconds = median_s(lambda: executor.sample_tokens(steps, [[7]] * rows, kv, params=GREEDY), 3) / steps
        kv_bytes = sum(kv.lengths) * executor.layout.page_bytes / executor.layout.page_tokens
    floor = (executor.weight_bytes + kv_bytes) / bandwidth
    speed = f"{seconds * 1e3:.2f} ms, {rows / seconds:.0f} tok/s"
    print(f"decode, {rows} rows at {context}: {speed}, bytes {floor * 1e3:.2f} ms ({floor / seconds:.0%})")


def prefill(executor: Executor, tokens: int, flops: float) -> None:
    """One long prompt in one step."""
    ids = [1 + i % 900 for i in range(tokens)]

    def once() -> None:
        with executor.create_kv_cache() as kv:
            kv.reserve(tokens)
            executor.run(Batch.of([Row(Ids(ids), range(tokens), kv, want=Nothing())]))

    seconds = median_s(once, 3)
    head = executor.spec.vocab_size * executor.spec.hidden_size
    work = 2 * tokens * (executor.weight_bytes / 2 - head)
    speed, made = f"{seconds * 1e3:.1f} ms, {tokens / seconds:.0f} tok/s", work / seconds
    print(f"prefill, {tokens}: {speed}, {made / 1e12:.0f} TFLOP/s ({made / flops:.0%})")


def agreement() -> None:
    """The kernels beside the reference on a small model."""
    found = {}
    for backend, device in (("triton", "cuda"), ("reference", "cpu")):
        executor = build_executor(
            random_checkpoint(SMALL, "cpu", torch.float32),
            RunConfig(device=device, backend=backend, kv_memory=64 << 20),
        )
        with executor.create_kv_cache(3) as kv:
            steps = [[[1, 2, 3], [4] * 170, [5, 6]], [[7], [8], [9]], [[7, 3, 4, 5], [8], [9] * 40]]
            logits = [executor.step(step, kv).cpu() for step in steps]
        with executor.create_kv_cache() as kv:
            tokens = executor.sample_tokens(20, list(range(1, 30)), kv, params=GREEDY)
        found[backend] = torch.cat(logits), tokens
    (ours, drawn), (truth, expected) = found["triton"], found["reference"]
    print(f"agreement: {(ours - truth).norm() / truth.norm():.2e}, tokens {drawn == expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--only", default="agreement,decode,batch,prefill")
    options = parser.parse_args()
    only = options.only.split(",")
    bandwidth, flops = limits()
    jobs: dict[str, Callable[[], None]] = {"agreement": agreement}
    executor = build_executor(random_checkpoint(SHAPES[options.shape]), RunConfig(device="cuda", kv_memory=48 << 30))
    jobs["decode"] = lambda: decode(executor, bandwidth)
    jobs["batch"] = lambda: [batch(executor, bandwidth, rows, 1000) for rows in (4, 64, 256)] and None
    jobs["prefill"] = lambda: [prefill(executor, tokens, flops) for tokens in (512, 2048, 8192)] and None
    for name, job in jobs.items():
        if name in only:
            try:
                job()
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    main()
