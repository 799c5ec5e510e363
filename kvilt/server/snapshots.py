"""What an inspector shows, built so seldom that serving does not feel it, and shared by all who ask at a time.

One snapshot is made at a time, in a thread of its own. After each, none is made for so long that making them takes at
most one part in twenty-five, however many ask; one key waits half a second between two of its own. Refuses to know what
a snapshot holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from ..kv.owner import owner_of
from ..llm.offload import INSPECT, Offload

EVERY_S = 0.5  # between two snapshots of one key
REST = 24  # so many times as long as a snapshot took, none is made
_MOST_REMEMBERED = 64  # keys whose next turn is remembered, before those whose turn has come are forgotten


class Snapshots:
    """Snapshots by tenant. Each answers only those who asked before it was begun."""

    def __init__(
        self,
        build: Callable[[str], bytes],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cost: Callable[[], float] = time.thread_time,
        offload: Offload | None = None,
    ) -> None:
        """`build` runs in a thread; `cost` is what that thread has used of a processor so far."""
        self._build = build
        self._clock = clock
        self._sleep = sleep
        self._cost = cost
        self._offload = offload or Offload()
        self._turn = asyncio.Lock()
        self._free_s = 0.0  # when the next one may be made
        self._due_s: dict[str, float] = {}  # by owner: when its next one may be
        self._coming: dict[str, asyncio.Task[bytes]] = {}  # by tenant: not begun yet

    async def get(self, tenant: str) -> bytes:
        """A snapshot for a tenant, made after this call."""
        coming = self._coming.get(tenant)
        if coming is None:
            coming = self._coming[tenant] = asyncio.ensure_future(self._make(tenant))
            coming.add_done_callback(_heard)
        return await asyncio.shield(coming)

    async def _make(self, tenant: str) -> bytes:
        try:
            await self._wait(self._next(owner_of(tenant)))
            await self._turn.acquire()
        except BaseException:
            del self._coming[tenant]
            raise
        try:
            try:
                await self._wait(self._free_s)
            finally:
                del self._coming[tenant]  # who asks from here on wants a later one
            made, took_s = await self._offload.run(INSPECT, self._timed, tenant)
            self._free_s = self._clock() + REST * took_s
            return made
        finally:
            self._turn.release()

    def _next(self, owner: str) -> float:
        """When an owner's next snapshot may be made; the one after it is later still."""
        now_s = self._clock()
        if len(self._due_s) > _MOST_REMEMBERED:
            self._due_s = {one: due_s for one, due_s in self._due_s.items() if due_s > now_s}
        due_s = max(now_s, self._due_s.get(owner, now_s))
        self._due_s[owner] = due_s + EVERY_S
        return due_s

    async def _wait(self, until_s: float) -> None:
        if (rest_s := until_s - self._clock()) > 0:
            await self._sleep(rest_s)

    def _timed(self, tenant: str) -> tuple[bytes, float]:
        before_s = self._cost()
        made = self._build(tenant)
        return made, self._cost() - before_s


def _heard(made: asyncio.Task[bytes]) -> None:
    """Whoever waited may have left: an error is no news then."""
    if not made.cancelled():
        made.exception()
