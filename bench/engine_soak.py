"""Mixed requests through AsyncLLM, 30 % of them left in the middle: pages, handles and memory end where they began.

python bench/engine_soak.py [--model smollm2] [--requests 2000] [--clients 24] [--threads 2]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvilt
from kvilt import AsyncLLM
from kvilt.config import EngineConfig

STEM = (
    "You are a helpful assistant who answers every question in one short sentence and never repeats the question. " * 3
)


def resident_bytes() -> int:
    """Memory of this process that is really there, without what the allocator keeps though nobody uses it."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def client(llm: AsyncLLM, dice: random.Random, count: int, seen: Counter[str]) -> None:
    """So many requests of all kinds, one after the other."""
    for _ in range(count):
        kind = dice.choice(["generate", "generate", "stream", "stream", "samples", "handle", "kept"])
        leaves = dice.random() < 0.3
        seen[f"{kind}{', left' if leaves else ''}"] += 1
        prompt = (
            STEM if dice.random() < 0.6 else ""
        ) + f"Question {dice.randrange(1000)}: what is {dice.randrange(100)}?"
        fields: dict[str, Any] = {"max_tokens": dice.randrange(1, 24), "temperature": dice.choice([0.0, 0.8])}
        work = asyncio.ensure_future(ask(llm, dice, kind, prompt, fields))
        if leaves:
            await asyncio.sleep(dice.random() * 0.5)
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work


async def ask(llm: AsyncLLM, dice: random.Random, kind: str, prompt: str, fields: dict[str, Any]) -> None:
    match kind:
        case "generate":
            await llm.generate(prompt, **fields, priority=dice.choice([0, 1]), tenant=dice.choice("ab"))
        case "stream":
            async with await llm.stream(prompt, **fields) as stream:
                async for delta in stream:
                    if delta.token is not None and dice.random() < 0.05:
                        await asyncio.sleep(0.05)  # a slow reader
        case "samples":
            await llm.generate(prompt, **fields, n=dice.randrange(2, 5))
        case "handle":
            made = await llm.kv.create(prompt)
            try:
                await llm.generate(" Answer:", **fields, kv=made.id)
            finally:
                await llm.kv.delete(made.id)
        case "kept":
            done = await llm.generate(prompt, **fields, keep_kv=True)
            done.kv.close()


async def soak(model: str, threads: int | None, requests: int, clients: int) -> None:
    llm = kvilt.load_async(
        model, threads=threads, kv_memory="96M", max_context=1024, engine=EngineConfig(unread_tokens=8, step_tokens=256)
    )
    seen: Counter[str] = Counter()
    async with llm:

        async def run(count: int, seed: int) -> None:
            share = -(-count // clients)
            await asyncio.gather(*(client(llm, random.Random(seed + n), share, seen) for n in range(clients)))
            while llm.engine.requests:
                await asyncio.sleep(0.01)

        for rows in range(1, 65):  # each size of step is recorded when it is first met, and that takes memory once
            await llm.generate("Hello", n=rows, max_tokens=3, ignore_eos=True)
        await run(300, 1)  # and by then every page was used once
        before = resident_bytes()
        started_s = time.perf_counter()
        await run(requests, 1000)
        seconds, grown = time.perf_counter() - started_s, resident_bytes() - before
        usage, handles = llm.executor.pool.usage(), await llm.kv.owned()
        print(f"{requests} requests in {seconds:.0f} s: {dict(sorted(seen.items()))}")
        print(f"pages in use {usage.used}, handles {len(handles)}, resident memory {grown / (1 << 20):+.1f} MiB")
        if usage.used or handles or grown > 32 << 20:
            sys.exit("something was left behind")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=24)
    arguments = parser.parse_args()
    asyncio.run(soak(arguments.model, arguments.threads, arguments.requests, arguments.clients))


if __name__ == "__main__":
    main()
