"""Stored responses: what was said, as messages, and a KV handle on its tokens. They live in memory, for a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from ...errors import HandleError, HandleLimit
from ...kv.cache import KVCache
from ...kv.owner import owner_of
from ...llm import AsyncLLM, AsyncStream
from ..http.errors import HTTPError
from .items import Message

MAX_BYTES = 32 << 20  # of the stored responses of one key; the oldest are dropped first


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where the KV of a response ends, so that the next prompt goes on from its tokens."""

    handle: str
    prompt: bytes  # a digest of all that stands before the messages: instructions, tools, template variables, adapter
    unread: tuple[int, ...]  # the last token, if it was sampled and belongs to the text: its KV is not computed
    exact: bool  # the tokens of the answer are its text and nothing else: neither reasoning nor calls


@dataclass(slots=True)
class StoredResponse:
    """One response."""

    tenant: str
    shown: dict[str, Any]  # as clients get it
    messages: list[Message] = field(default_factory=list)  # the whole conversation, without instructions
    continuation: Continuation | None = None
    stream: AsyncStream | None = None  # while it is in progress
    cancelled: bool = False  # by a request
    expires_s: float = 0.0
    bytes: int = 0


class ResponseStore:
    """The stored responses of all tenants. A response that a tenant does not own does not exist for it."""

    def __init__(self, llm: AsyncLLM, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` responses of one key are stored."""
        self._llm = llm
        self._most = most
        self._clock = clock
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # the oldest first

    def find(self, name: str, tenant: str, param: str | None = None) -> StoredResponse:
        """A response of a tenant."""
        found = self._stored.get(name)
        if found is None or found.tenant != tenant or found.expires_s <= self._clock():
            message = "there is no such response; it was not stored, or was deleted, or has expired"
            code = "previous_response_not_found" if param else "response_not_found"
            raise HTTPError(404, message, param=param, code=code)
        return found

    def holds(self, name: str, tenant: str) -> bool:
        """Whether a response of a tenant is here, rather than noted by another process."""
        found = self._stored.get(name)
        return found is not None and found.tenant == tenant and found.expires_s > self._clock()

    async def put(self, name: str, stored: StoredResponse) -> None:
        """Store a response, or what it has become. The oldest of its key give way."""
        stored.expires_s = self._clock() + self._llm.config.handle_ttl_s
        stored.bytes = len(orjson.dumps(stored.shown)) + len(orjson.dumps(stored.messages))
        self._stored[name] = stored
        await self._make_room(owner_of(stored.tenant))

    async def keep_kv(self, kv: KVCache, tenant: str) -> str | None:
        """A handle on the KV of a response; None where the key may have no more. Takes the cache over."""
        try:
            return (await self._llm.kv.keep(kv, tenant=tenant)).id
        except HandleLimit:
            return None

    async def delete(self, name: str, tenant: str) -> None:
        """Forget a response and its KV."""
        self.find(name, tenant)
        await self._drop(name)

    async def _make_room(self, owner: str) -> None:
        now_s = self._clock()
        for name in [name for name, one in self._stored.items() if one.expires_s <= now_s]:
            await self._drop(name)
        mine = [name for name, one in self._stored.items() if owner_of(one.tenant) == owner]
        while len(mine) > self._most or (len(mine) > 1 and self._bytes(mine) > MAX_BYTES):
            await self._drop(mine.pop(0))

    def _bytes(self, names: list[str]) -> int:
        return sum(self._stored[name].bytes for name in names)

    async def _drop(self, name: str) -> None:
        dropped = self._stored.pop(name, None)
        if dropped is None or dropped.continuation is None:
            return
        try:
            await self._llm.kv.delete(dropped.continuation.handle, tenant=dropped.tenant)
        except HandleError:
            return  # it has expired
