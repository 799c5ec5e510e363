"""Stored responses: what was said, as messages, and a KV handle on its tokens. They live in memory, for a while.

Where the model has a store that outlives the process, they are noted there, and any process that shares it finds them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import orjson

from ...errors import HandleError, HandleLimit
from ...kv.cache import KVCache
from ...kv.owner import owner_of
from ...llm import AsyncLLM
from ...llm.offload import FILES
from ..http.errors import HTTPError
from .noted import NotedResponses
from .stored_response import Continuation as Continuation
from .stored_response import StoredResponse as StoredResponse

MAX_BYTES = 32 << 20  # of the stored responses of one key; the oldest are dropped first
_NOTE_WAIT_S = 2.0  # how long a response waits until it is noted


class ResponseStore:
    """The stored responses of all tenants. A response that a tenant does not own does not exist for it."""

    def __init__(self, llm: AsyncLLM, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` responses of one key are stored."""
        self._llm = llm
        self._most = most
        self._clock = clock
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # the oldest first
        notes = llm.response_notes
        self._noted = None if notes is None else NotedResponses(notes, self._stored, clock)

    def find(self, name: str, tenant: str, param: str | None = None) -> StoredResponse:
        """A response of a tenant."""
        found = self._stored.get(name)
        if found is None and self._noted is not None and (found := self._noted.find(name, tenant)) is not None:
            self._stored[name] = found
        if found is None or found.tenant != tenant or found.expires_s <= self._clock():
            message = "there is no such response; it was not stored, or was deleted, or has expired"
            code = "previous_response_not_found" if param else "response_not_found"
            raise HTTPError(404, message, param=param, code=code)
        return found

    def held_since(self, name: str, tenant: str) -> float | None:
        """When a response that is here was stored, by the calendar; None where it is not here."""
        found = self._stored.get(name)
        if found is None or found.tenant != tenant or found.expires_s <= self._clock():
            return None
        return time.time() + found.expires_s - self._clock() - self._llm.config.handle_ttl_s

    async def put(self, name: str, stored: StoredResponse) -> None:
        """Store a response, or what it has become. The oldest of its key give way."""
        stored.expires_s = self._clock() + self._llm.config.handle_ttl_s
        stored.bytes = len(orjson.dumps(stored.shown)) + len(orjson.dumps(stored.messages))
        self._stored[name] = stored
        await self._make_room(owner_of(stored.tenant))
        if stored.stream is None:  # one that is in progress cannot be continued yet
            await self._note(name, stored.tenant)

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
        await self._note(name, tenant)

    async def _note(self, name: str, tenant: str) -> None:
        """Note a response; where other processes go on with it, before it is confirmed."""
        if self._noted is None:
            return
        self._noted.mark(name)
        if self._llm.config.shared_notes:
            await self._llm.offload.run(FILES, self._noted.flush, _NOTE_WAIT_S, owner=owner_of(tenant))

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
        if self._noted is not None:
            self._noted.mark(name)
        if dropped is None or dropped.continuation is None:
            return
        try:
            await self._llm.kv.delete(dropped.continuation.handle, tenant=dropped.tenant)
        except HandleError:
            return  # it has expired
