"""A batch of requests with shared prompts, beside the same requests sent in random order by one client at a time.

`python bench/batch.py` answers 8 groups of 12 questions, each group with a system prompt of its own, in one process: by
`BatchRunner`, and one after the other. Both begin with an empty prefix index, and both may use it. Runs alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

from kvilt.llm import AsyncLLM, load_async
from kvilt.server.auth import Caller
from kvilt.server.batches.lines import BatchLine, read_lines
from kvilt.server.batches.runner import BatchRunner
from kvilt.server.config import ServeConfig
from kvilt.server.service import Service

PLACES = ("mill", "bridge", "market", "tower", "harbour", "school", "garden", "station")


def requests(groups: int, each: int, tokens: int) -> list[BatchLine]:
    """Questions under system prompts that are long and differ from their beginning on."""
    lines = []
    for group in range(groups):
        guide = f"You are the guide of the {PLACES[group % len(PLACES)]} number {group}. " * 24
        for question in range(each):
            messages = [
                {"role": "system", "content": guide},
                {"role": "user", "content": f"Question {question}: what is to be seen on floor {question * 3}?"},
            ]
            body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "seed": 1}
            lines.append({"custom_id": f"{group}-{question}", "url": "/v1/chat/completions", "body": body})
    return list(read_lines(map(json.dumps, lines)))


async def timed(llm: AsyncLLM, lines: list[BatchLine], together: bool) -> tuple[float, int]:
    """Generated tokens per second, and prompt tokens that were computed."""
    llm.executor.prefixes.clear()
    answers: list[dict[str, Any]] = []
    runner = BatchRunner(Service(llm, ServeConfig(names=("model",))), Caller())
    began_s = time.perf_counter()
    if together:
        await runner.run(lines, answers.append)
    else:
        for line in random.Random(3).sample(lines, len(lines)):
            await runner.run([line], answers.append)
    took_s = time.perf_counter() - began_s
    usage = [answer["response"]["body"]["usage"] for answer in answers]
    computed = sum(one["prompt_tokens"] - one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    return sum(one["completion_tokens"] for one in usage) / took_s, computed


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--each", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-memory", default="256M")
    given = parser.parse_args()
    lines = requests(given.groups, given.each, given.tokens)
    rates: dict[bool, list[float]] = {True: [], False: []}
    async with load_async(given.model, kv_memory=given.kv_memory) as llm:
        for _ in range(given.rounds):
            for together in (False, True):
                rate, computed = await timed(llm, lines, together)
                rates[together].append(rate)
                name = "batch" if together else "one at a time"
                print(f"{name:14} {rate:8.1f} generated tok/s, {computed:,} prompt tokens computed")
    batch, one = statistics.median(rates[True]), statistics.median(rates[False])
    print(f"{batch / one:.2f}x ({batch:.0f} against {one:.0f} tok/s, medians of {given.rounds})")


if __name__ == "__main__":
    asyncio.run(main())
