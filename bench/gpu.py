"""What a GPU is used for, beside what it could do: decode, batches and prefill of models with random weights.

    python bench/gpu.py [--shape 8b|1b|0.6b|30b-a3b|gpt-oss-20b|qwen3.5-9b] [--format Q4_K]
        [--only decode,batch,prefill,profile,one,engine,mix,baselines]
        [--kv-dtype float8_e4m3fn] [--deterministic]

Limits (bytes a second read, operations a second) are measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from active_bytes import kv_bytes, multiplied, weight_bytes
from gpu_baselines import baselines
from random_model import (
    GPT_OSS_20B,
    LLAMA_1B,
    LLAMA_8B,
    QWEN3_06B,
    QWEN3_30B_A3B,
    QWEN35_9B,
    SMALL,
    random_checkpoint,
)

from kvilt.batch import Batch, Ids, Logits, Nothing, Row
from kvilt.config import RunConfig
from kvilt.engine.engine import Engine
from kvilt.engine.event import TokenEvent
from kvilt.engine.request import Request
from kvilt.executor.load import build_executor
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams

SHAPES = {
    "8b": LLAMA_8B, "1b": LLAMA_1B, "0.6b": QWEN3_06B, "30b-a3b": QWEN3_30B_A3B, "gpt-oss-20b": GPT_OSS_20B,
    "qwen3.5-9b": QWEN35_9B, "small": SMALL,
}  # fmt: skip
FORMATS = {"gpt-oss-20b": "MXFP4"}  # where a shape has one of its own
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
    size = executor.weight_bytes
    share, read = size / bandwidth / seconds, f"{size / 1e9:.2f} GB of weights"
    print(f"decode, batch 1: {1 / seconds:.0f} tok/s, {seconds * 1e3:.3f} ms a step, {read}, {share:.0%} of bandwidth")


def batch(executor: Executor, bandwidth: float, rows: int, context: int) -> None:
    """Many sequences in one step."""
    with executor.create_kv_cache(rows) as kv:
        # Rows of their own each, which choose experts of their own.
        executor.prefill([[1 + (7 * i + 13 * row) % 900 for i in range(context)] for row in range(rows)], kv)
        last, steps = [[5 + row] for row in range(rows)], 32
        executor.sample_tokens(40, last, kv, params=GREEDY)
        seconds = median_s(lambda: executor.sample_tokens(steps, last, kv, params=GREEDY), 3) / steps
        floor = (weight_bytes(executor, rows) + kv_bytes(executor, kv)) / bandwidth
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
    work = 2 * tokens * multiplied(executor)
    speed, made = f"{seconds * 1e3:.1f} ms, {tokens / seconds:.0f} tok/s", work / seconds
    print(f"prefill, {tokens}: {speed}, {made / 1e12:.0f} TFLOP/s ({made / flops:.0%})")


def profile(executor: Executor, rows: int) -> None:
    """Kernels of a decode step, by the time they take together; where kernels overlap that is more than the step's."""
    steps = 16
    with executor.create_kv_cache(rows) as kv:
        executor.prefill([[1 + (7 * i + row) % 900 for i in range(400)] for row in range(rows)], kv)
        last = [[5 + row] for row in range(rows)]
        executor.sample_tokens(40, last, kv, params=GREEDY)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            executor.sample_tokens(steps, last, kv, params=GREEDY)
            torch.cuda.synchronize()
    print(f"kernels of a step of {rows} rows:")
    for one in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:16]:
        each, count = one.self_device_time_total / one.count, one.count / steps
        print(f"    {each * count:8.1f} us = {count:6.1f} x {each:6.2f} us  {one.key[:60]}")


class Tokens:
    """A listener that counts."""

    def __init__(self) -> None:
        self.count = 0

    def on_event(self, event: object) -> bool:
        self.count += isinstance(event, TokenEvent)
        return False


def served(executor: Executor, requests: Sequence[Request]) -> tuple[float, float, int]:
    """All requests at once through an engine: seconds, seconds of its steps on the device, tokens."""
    executor.prefixes.clear()
    engine, listener, events, run = Engine(executor), Tokens(), [], executor.run

    def timed(batch: Batch) -> Logits:
        events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        events[-1][0].record()
        logits = run(batch)
        events[-1][1].record()
        return logits

    executor.run = timed  # type: ignore[method-assign]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for request in requests:
        engine.add(engine.prepare(request, listener))
    while engine.step():
        pass
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    executor.run = run  # type: ignore[method-assign]
    return seconds, sum(a.elapsed_time(b) for a, b in events) / 1e3, listener.count


def engine_alone(executor: Executor) -> None:
    """One request through the engine."""
    params = SamplingParams(max_tokens=256, temperature=0.0)
    seconds, steps, tokens = min(served(executor, [Request([5] * 16, params)]) for _ in range(4))
    print(f"engine, batch 1: {tokens / seconds:.0f} tok/s, steps {steps / seconds:.0%} of the time")


def engine_batch(executor: Executor, prompts: tuple[int, int], drawn: tuple[int, int], title: str) -> None:
    """256 requests of random lengths at once; the second run, which finds its graphs captured."""
    dice, vocab = random.Random(0), executor.spec.vocab_size

    def requests() -> list[Request]:
        return [
            Request(
                [dice.randrange(vocab) for _ in range(dice.randint(*prompts))],
                SamplingParams(max_tokens=dice.randint(*drawn), temperature=0.6),
            )
            for _ in range(256)
        ]

    dice.seed(1)
    served(executor, requests())
    dice.seed(1)
    seconds, steps, tokens = served(executor, requests())
    print(f"engine, {title}: {tokens / seconds:.0f} output tok/s, {seconds:.2f} s, steps {steps / seconds:.0%} of it")


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
    parser.add_argument("--only", default="agreement,decode,batch,prefill,one,engine,mix")
    parser.add_argument("--format", default="", help="that matrices are packed in, like Q4_K")
    parser.add_argument("--rows", default="4,64,256", help="of the rows 'batch'")
    parser.add_argument("--tokens", default="512,2048,8192", help="of the rows 'prefill'")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    only = options.only.split(",")
    if only == ["baselines"]:
        baselines(SHAPES[options.shape])
        return
    bandwidth, flops = limits()
    jobs: dict[str, Callable[[], None]] = {"agreement": agreement}
    start = time.perf_counter()
    executor = build_executor(
        random_checkpoint(SHAPES[options.shape], format_=options.format or FORMATS.get(options.shape, "")),
        RunConfig(device="cuda", kv_memory=48 << 30, kv_dtype=options.kv_dtype, deterministic=options.deterministic),
    )
    print(f"{options.shape}: {time.perf_counter() - start:.1f} s to make, {torch.cuda.memory_allocated() / 1e9:.1f} GB")
    gc.collect()
    gc.freeze()  # as `kvilt serve` does
    jobs["decode"] = lambda: decode(executor, bandwidth)
    rows, tokens = ([int(one) for one in given.split(",")] for given in (options.rows, options.tokens))
    jobs["batch"] = lambda: [batch(executor, bandwidth, one, 1000) for one in rows] and None
    jobs["prefill"] = lambda: [prefill(executor, one, flops) for one in tokens] and None
    jobs["profile"] = lambda: profile(executor, 1)
    jobs["one"] = lambda: engine_alone(executor)
    jobs["engine"] = lambda: engine_batch(executor, (100, 1000), (128, 128), "256 x 100-1,000 in, 128 out")
    jobs["mix"] = lambda: engine_batch(executor, (100, 1024), (100, 1024), "256 x 100-1,024 in, 100-1,024 out")
    jobs["baselines"] = lambda: baselines(SHAPES[options.shape])
    for name, job in jobs.items():
        if name in only:
            try:
                job()
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    main()
