"""Time to the first token of six long documents and a question on a GPU: computed, blended and reused; and a fork.

    python bench/gpu_blend.py [--shape 8b] [--documents 6] [--tokens 4096] [--profile]

Random weights. Documents are stored in host memory. The speed of copies from there is measured in the same run.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import statistics
import time
import traceback
from collections.abc import Callable

import torch
from random_model import LLAMA_1B, LLAMA_8B, SMALL, random_checkpoint

from kvilt.batch import Batch, Ids, Last, Nothing, Row
from kvilt.blend.blender import Blending
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import RunConfig
from kvilt.executor.load import build_executor
from kvilt.executor.protocol import Executor
from kvilt.store.store import Store
from kvilt.store.tier import Budget

SHAPES = {"8b": LLAMA_8B, "1b": LLAMA_1B, "small": SMALL}
STEP_TOKENS = 8192
RATIO = 0.15
RECIPES = {
    "reused as stored": Recipe(0.0, "head", repair=0.0, min_gain=0.0),
    "head 15 %": Recipe(RATIO, "head", repair=0.0, min_gain=0.0),
    "deviation 15 %": Recipe(RATIO, "deviation", repair=0.0, min_gain=0.0),
    "query 15 %": Recipe(RATIO, "query", repair=0.0, min_gain=0.0),
    "query 15 %, repaired": Recipe(RATIO, "query", min_gain=0.0),
    "deviation 15 %, repaired": Recipe(RATIO, "deviation", min_gain=0.0),
}


def copy_speed() -> float:
    """Bytes a second from pinned host memory to the device."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return len(host) / statistics.median(times[1:])


def whole(executor: Executor, prompt: BlendPrompt) -> None:
    """The prompt computed, up to its first token."""
    ids = prompt.ids
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        for at in range(0, len(ids), STEP_TOKENS):
            stop = min(at + STEP_TOKENS, len(ids))
            want = Last() if stop == len(ids) else Nothing()
            logits = executor.run(Batch.of([Row(Ids(ids[at:stop]), range(at, stop), kv, want=want)])).values
        int(logits.argmax())


def blended(
    executor: Executor, chunks: ChunkCache, prompt: BlendPrompt, recipe: Recipe, phases: dict[str, float] | None = None
) -> None:
    """The same by blending; with `phases`, seconds of its parts, which the device is waited for between."""
    with executor.create_kv_cache() as kv:
        blending = Blending(executor, chunks, prompt, recipe)
        marks = Marks(phases)
        blending.begin(kv)
        marks.add("begin")
        while not blending.done:
            row = blending.next(STEP_TOKENS)
            marks.add("next row")
            batch = Batch.of([row])
            marks.add("batch")
            logits = executor.run(batch)
            marks.add(f"run {len(row.positions)} tokens{', load' if row.loads else ''}")
            blending.took(row, logits, 0)
            marks.add("select")
        int(logits.values.argmax())


class Marks:
    """Seconds between marks, by name."""

    def __init__(self, found: dict[str, float] | None) -> None:
        self._found, self._last_s = found, time.perf_counter()

    def add(self, name: str) -> None:
        if self._found is None:
            return
        torch.cuda.synchronize()
        now_s = time.perf_counter()
        self._found[name] = self._found.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s


def median_s(work: Callable[[], None], repeat: int = 4) -> float:
    times = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def first_tokens(executor: Executor, documents: int, tokens: int, profile: str) -> None:
    dice, vocab = random.Random(3), executor.spec.vocab_size
    texts = [[dice.randrange(vocab) for _ in range(tokens)] for _ in range(documents)]
    question = [dice.randrange(vocab) for _ in range(32)]
    prompt = BlendPrompt.of([*texts, question], [True] * documents + [False])
    speed = copy_speed()
    kv_bytes = documents * tokens * executor.layout.page_bytes // executor.layout.page_tokens
    print(
        f"copies in: {speed / 1e9:.1f} GB/s; KV of documents {kv_bytes / 1e9:.2f} GB, {kv_bytes / speed * 1e3:.0f} ms"
    )
    with Store(Budget(2 * kv_bytes)) as store:
        chunks = ChunkCache(executor, store)
        start = time.perf_counter()
        blended(executor, chunks, prompt, RECIPES["reused as stored"])
        print(f"documents computed and stored in {time.perf_counter() - start:.2f} s")
        computed = median_s(lambda: whole(executor, prompt), 3)
        print(f"whole prefill of {len(prompt.ids)} tokens: {computed * 1e3:.0f} ms")
        for name, recipe in RECIPES.items():
            try:
                seconds = median_s(lambda recipe=recipe: blended(executor, chunks, prompt, recipe))  # type: ignore[misc]
                print(f"{name}: {seconds * 1e3:.0f} ms, {computed / seconds:.2f}x sooner", flush=True)
                phases: dict[str, float] = {}
                blended(executor, chunks, prompt, recipe, phases)
                print("   ", ", ".join(f"{part} {taken * 1e3:.1f}" for part, taken in phases.items()), "ms")
            except Exception:
                traceback.print_exc()
        for name in profile.split(";") if profile else ():
            profiled(lambda name=name: blended(executor, chunks, prompt, RECIPES[name]), name)  # type: ignore[misc]


def profiled(work: Callable[[], None], name: str) -> None:
    """Where the time of the device goes, by kernel, and that of the host, by function."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        work()
        torch.cuda.synchronize()
    print(f"{name}, with the profiler")
    events = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    for one in [one for one in events if one.self_device_time_total][:12]:
        print(f"    {one.self_device_time_total / 1e3:8.2f} ms {one.count:6d}x {one.key[:90]}")
    host = cProfile.Profile()
    host.runcall(work)
    pstats.Stats(host).sort_stats("tottime").print_stats(18)


def fork(executor: Executor, tokens: int = 32768) -> None:
    """A fork of a long cache: its time, and the pages it takes."""
    with executor.create_kv_cache() as kv:
        executor.prefill([1 + i % 900 for i in range(tokens)], kv)
        torch.cuda.synchronize()
        times, used = [], executor.pool.usage().used
        allocated = torch.cuda.memory_allocated()
        for _ in range(20):
            start = time.perf_counter()
            child = kv.fork()
            times.append(time.perf_counter() - start)
            more, bytes_more = executor.pool.usage().used - used, torch.cuda.memory_allocated() - allocated
            child.close()
        print(
            f"fork of {tokens} tokens: {statistics.median(times) * 1e6:.0f} us, {more} pages, {bytes_more} bytes more"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--profile", default="", help="names of ways whose time is listed by kernel and function, with ; between"
    )
    options = parser.parse_args()
    executor = build_executor(random_checkpoint(SHAPES[options.shape]), RunConfig(device="cuda", kv_memory=24 << 30))
    gc.collect()
    gc.freeze()
    for job in (
        lambda: fork(executor),
        lambda: first_tokens(executor, options.documents, options.tokens, options.profile),
    ):
        try:
            job()
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
