"""What the KV memory holds, as an inspector shows it, built so rarely that serving does not slow down."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from ...engine.handles.handles import HandleInfo
from ...engine.view import EngineView
from ...errors import HandleError
from ...kv.owner import owner_of
from ...kv.prefix_branches import PrefixBranch
from ...llm import AsyncLLM
from ...llm.offload import INSPECT, Offload

_SHOWN_TOKENS = 64
MOST_SHOWN = 512  # samples, prefixes and handles, of each


def kv_state_json(llm: AsyncLLM, tenant: str) -> bytes:
    """A tenant's part of the KV memory, and the use of the whole page pool, as JSON."""
    view = llm.view(tenant, MOST_SHOWN)
    state = {
        "pages": dataclasses.asdict(view.pages),
        "samples": [dataclasses.asdict(sample) for sample in view.samples],
        "prefixes": [_prefix(llm, branch) for branch in view.prefixes],
        "handles": [{**dataclasses.asdict(one), "prefix": _leaf(llm, tenant, view, one)} for one in view.handles],
        "omitted": view.omitted,
    }
    return orjson.dumps(state)


def _leaf(llm: AsyncLLM, tenant: str, view: EngineView, handle: HandleInfo) -> str | None:
    """The longest cached prefix that a handle begins with, which shares its pages."""
    try:
        ids = llm.kv.tokens(handle.id, tenant=tenant)
    except HandleError:
        return None  # deleted since the view was made
    size, found = view.pages.page_tokens, None
    for branch in view.prefixes:  # parents come first
        if branch.parent == found and tuple(ids[branch.start : branch.start + size]) == branch.tokens[:size]:
            found = branch.id
    return found


def _prefix(llm: AsyncLLM, branch: PrefixBranch) -> dict[str, Any]:
    """A branch of the prefix tree with the text of its first tokens."""
    first = [token for token in branch.tokens[:_SHOWN_TOKENS] if isinstance(token, int)]
    rest = {name: getattr(branch, name) for name in ("id", "parent", "adapter", "start", "pages", "hits", "caches")}
    return {**rest, "tokens": len(branch.tokens), "text": llm.tokenizer.decode(first, skip_special=False)}


EVERY_S = 0.5  # between two snapshots of one key
REST = 24  # after a snapshot, none is made for this many times its duration: at most 1/25 of a processor
_MOST_REMEMBERED = 64  # keys with a due time, before past due times are dropped


class ThrottledSnapshots:
    """Snapshots by tenant, one at a time, in a thread. A snapshot answers only the calls made before it was started.

    Callers of one tenant share a snapshot. One key gets at most one snapshot in `EVERY_S`. This class does not know
    what a snapshot holds.
    """

    def __init__(
        self,
        build: Callable[[str], bytes],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cost: Callable[[], float] = time.thread_time,
        offload: Offload | None = None,
    ) -> None:
        """`build` runs in a thread; `cost` is the processor time of that thread so far."""
        self._build = build
        self._clock = clock
        self._sleep = sleep
        self._cost = cost
        self._offload = offload or Offload()
        self._turn = asyncio.Lock()
        self._free_s = 0.0  # when the next snapshot may be made
        self._due_s: dict[str, float] = {}  # by owner: when its next snapshot may be made
        self._coming: dict[str, asyncio.Task[bytes]] = {}  # by tenant: not started yet

    async def get(self, tenant: str) -> bytes:
        """A snapshot for a tenant, made after this call."""
        coming = self._coming.get(tenant)
        if coming is None:
            coming = self._coming[tenant] = asyncio.ensure_future(self._make(tenant))
            coming.add_done_callback(_retrieve_error)
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
                del self._coming[tenant]  # later calls need a later snapshot
            made, took_s = await self._offload.run(INSPECT, self._timed, tenant)
            self._free_s = self._clock() + REST * took_s
            return made
        finally:
            self._turn.release()

    def _next(self, owner: str) -> float:
        """Reserve the time of an owner's next snapshot."""
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


def _retrieve_error(made: asyncio.Task[bytes]) -> None:
    """Mark an error as retrieved: the caller that waited for it may have disconnected."""
    if not made.cancelled():
        made.exception()
