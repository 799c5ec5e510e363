"""Memory goes back to the system after large requests: soon, seldom, and off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from running import until

from kvilt.llm.offload import Offload
from kvilt.server.http.body import LARGE_BYTES, MemoryTrimmer, system_trim


def test_many_large_requests_cost_one_trim_and_small_ones_none() -> None:
    async def scene() -> None:
        calls: list[str] = []
        go = threading.Event()

        def trim() -> None:
            calls.append(threading.current_thread().name)
            go.wait(30)

        trimmer = MemoryTrimmer(Offload(), trim, pause_s=0.0)
        trimmer.ended(LARGE_BYTES - 1)
        assert trimmer._task is None
        for _ in range(100):
            trimmer.ended(LARGE_BYTES)
        while not calls:
            await asyncio.sleep(0.005)
        trimmer.ended(LARGE_BYTES)  # while it runs: once more, later
        go.set()
        assert trimmer._task is not None
        await asyncio.wait_for(trimmer._task, 30)
        assert calls == ["kvilt-owner"] * 2

    asyncio.run(scene())


def test_a_trim_that_fails_harms_nothing() -> None:
    async def scene() -> None:
        def trim() -> None:
            raise OSError("no")

        trimmer = MemoryTrimmer(Offload(), trim, pause_s=0.0)
        trimmer.ended(LARGE_BYTES)
        assert trimmer._task is not None
        await asyncio.wait_for(trimmer._task, 30)

    asyncio.run(scene())


def test_a_large_request_is_followed_by_a_trim(start: Callable[..., Any]) -> None:
    """Also one that is refused; and the system's own call can be made."""
    with start() as server, server.http() as http:
        calls: list[int] = []
        server.service.memory_trimmer = MemoryTrimmer(server.llm.offload, lambda: calls.append(1), pause_s=0.0)
        assert http.post("/v1/completions", json={"prompt": "x " * LARGE_BYTES}).status_code == 400
        until(lambda: calls == [1])
    if (trim := system_trim()) is not None:
        trim()
