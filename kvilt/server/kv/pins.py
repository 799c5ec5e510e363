"""Pinned prefixes of prompts: handles on exactly the tokens before a cache breakpoint, kept for as long as clients ask.

A pin that cannot be made costs computing later, so it never fails a request.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import HandleError, HandleLimit
from ...kv.cache import KVCache
from ...kv.owner import owner_of
from ...llm import AsyncLLM

MAX_PINS = 64  # of one key; the least recently used is dropped first


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The first tokens of a prompt, and for how long their KV is kept."""

    tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class _Pin:
    tenant: str
    maker: str  # the base model, or an adapter; "": pinned by name
    digest: bytes  # of the tokens, or the name


class PrefixPins:
    """The pins of all tenants, by their tokens: a prefix that is asked for again is kept longer, not kept twice."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._handles: OrderedDict[_Pin, str] = OrderedDict()  # the least recently used first

    async def pin(self, kv: KVCache, prefixes: Sequence[PinnedPrefix], tenant: str) -> None:
        """Pin prefixes of what a cache holds. Takes the cache over."""
        with kv:
            ids = kv.row(0).ids
            for prefix in prefixes:
                pin = _Pin(tenant, kv.maker, _digest(ids[: prefix.tokens]))
                if not await self._extended(pin, prefix.ttl_s):
                    await self._add(pin, kv, prefix)

    async def pin_named(self, kv: KVCache, name: str, tenant: str, ttl_s: float) -> None:
        """Pin all that a cache holds under a name, in place of what was pinned under it. Takes the cache over."""
        pin = _Pin(tenant, "", name.encode("utf-8", "surrogatepass"))
        with kv:
            if pin in self._handles:
                await self._drop(pin)
            await self._add(pin, kv, PinnedPrefix(kv.num_entries, ttl_s))

    async def _extended(self, pin: _Pin, ttl_s: float) -> bool:
        """Whether a pin is there, and is kept longer now."""
        if (handle := self._handles.get(pin)) is None:
            return False
        try:
            info = await self._llm.kv.pin(handle, ttl_s, tenant=pin.tenant)
        except HandleError:  # it has expired, or its owner has deleted it
            self._handles.pop(pin, None)
            return False
        if pin in self._handles:
            self._handles.move_to_end(pin)
        if not info.resident:
            await self._drop(pin)  # its KV was evicted; the request has computed it again
        return info.resident

    async def _add(self, pin: _Pin, kv: KVCache, prefix: PinnedPrefix) -> None:
        mine = [one for one in self._handles if owner_of(one.tenant) == owner_of(pin.tenant)]
        for oldest in mine[: len(mine) - MAX_PINS + 1]:
            await self._drop(oldest)
        own = kv.fork_to(prefix.tokens)
        if own.num_entries < prefix.tokens:  # a sliding window has dropped the part before
            own.close()
            return
        try:
            info = await self._llm.kv.keep(own, tenant=pin.tenant, ttl_s=prefix.ttl_s)
        except HandleLimit:  # the key has as many handles, or pages in them, as it may have
            return
        await self._llm.kv.pin(info.id, prefix.ttl_s, tenant=pin.tenant)
        if pin in self._handles:  # another request has pinned the same meanwhile
            await self._drop(pin)
        self._handles[pin] = info.id

    async def _drop(self, pin: _Pin) -> None:
        if (handle := self._handles.pop(pin, None)) is None:
            return
        try:
            await self._llm.kv.delete(handle, tenant=pin.tenant)
        except HandleError:
            return


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(array("q", ids).tobytes()).digest()
