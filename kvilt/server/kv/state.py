"""What the KV memory holds, as an inspector shows it, built so rarely that serving does not slow down."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from ...engine.handles import HandleInfo
from ...engine.view import EngineView
from ...errors import HandleError
from ...kv.owner import owner_of
from ...kv.prefix import PrefixBranch
from ...llm import AsyncLLM
from ...llm.offload import INSPECT, Offload

_SHOWN_TOKENS = 64
MOST_SHOWN = 512  # samples, prefixes and handles, of each


def kv_state_json(llm: AsyncLLM, tenant: str) -> bytes:
    """A tenant's part of the KV memory, and how full all of it is, as JSON."""
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
    """The last known prefix that a handle begins with: those of the same branch share its pages."""
    try:
        ids = llm.kv.tokens(handle.id, tenant=tenant)
    except HandleError:
        return None  # gone since it was seen
    size, found = view.pages.page_tokens, None
    for branch in view.prefixes:  # parents come first
        if branch.parent == found and tuple(ids[branch.start : branch.start + size]) == branch.tokens[:size]:
            found = branch.id
    return found


def _prefix(llm: AsyncLLM, branch: PrefixBranch) -> dict[str, Any]:
    """A branch with its beginning as text; all of its tokens would be too many."""
    first = [token for token in branch.tokens[:_SHOWN_TOKENS] if isinstance(token, int)]
    rest = {name: getattr(branch, name) for name in ("id", "parent", "adapter", "start", "pages", "hits", "caches")}
    return {**rest, "tokens": len(branch.tokens), "text": llm.tokenizer.decode(first, skip_special=False)}


EVERY_S = 0.5  # between two snapshots of one key
REST = 24  # so many times as long as a snapshot took, none is made
_MOST_REMEMBERED = 64  # keys whose next turn is remembered, before those whose turn has come are forgotten


class ThrottledSnapshots:
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


def _retrieve_error(made: asyncio.Task[bytes]) -> None:
    """Whoever waited may have left: an error is no news then."""
    if not made.cancelled():
        made.exception()
