"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from ..llm import AsyncStream, Delta

_AHEAD = 64  # deltas read before somebody takes them


async def merged(streams: Sequence[AsyncStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Every delta with the index of its stream, as they come; the first failure ends it."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue(_AHEAD)

    async def pump(index: int) -> None:
        try:
            async for delta in streams[index]:
                await queue.put((index, delta))
        finally:
            await queue.put(None)

    tasks = [asyncio.ensure_future(pump(index)) for index in range(len(streams))]
    try:
        left = len(tasks)
        while left:
            if (item := await queue.get()) is not None:
                yield item
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
