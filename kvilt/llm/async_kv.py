"""Named KV handles for event loops: the verbs of `Handles`, and the computing that some of them need."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from ..batch import Adapter
from ..engine.handles.handles import HandleInfo, Handles
from ..errors import InputError, QueueFull
from ..kv.cache import KVCache
from ..kv.owner import owner_of
from .model import AdapterChoice, Message, Prompt
from .offload import FILES, PROMPT, Offload

_DELETE_WAIT_S = 2.0  # how long a delete waits until the note on disk is gone


class ChatIds(Protocol):
    """Messages, and perhaps tools, as tokens."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        answers: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


class AsyncKV:
    """The handles of an `AsyncLLM`. A handle that a tenant does not own does not exist for it."""

    def __init__(
        self,
        handles: Handles,
        prompt_ids: Callable[[Prompt], list[int]],
        chat_ids: ChatIds,
        compute: Callable[[Sequence[int], str, Adapter], Awaitable[KVCache]],
        adapter: Callable[[AdapterChoice, Sequence[int]], Adapter],
        offload: Offload,
    ) -> None:
        self._handles = handles
        self._prompt_ids = prompt_ids
        self._chat_ids = chat_ids
        self._compute = compute
        self._adapter = adapter
        self._offload = offload

    async def create(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tenant: str = "",
        ttl_s: float | None = None,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
    ) -> HandleInfo:
        """Compute the KV of a prompt, or of the first messages of a conversation, and keep it as a handle."""
        if (prompt is None) == (messages is None):
            raise InputError("a handle is made from a prompt or from messages; give one of them")
        if messages is None:
            assert prompt is not None
            ids = await self._offload.run(PROMPT, self._prompt_ids, prompt, owner=owner_of(tenant))
        else:
            given = (messages, tools, False, chat_template_kwargs)
            ids = await self._offload.run(PROMPT, self._chat_ids, *given, owner=owner_of(tenant))
        self._handles.check_room(tenant, len(ids))
        adapter = self._adapter(AdapterChoice(lora, lora_scale), ids)
        return self._handles.keep(tenant, await self._compute(ids, tenant, adapter), ttl_s)

    async def keep(self, kv: KVCache, *, tenant: str = "", ttl_s: float | None = None) -> HandleInfo:
        """A handle on the KV that a completion kept; takes the cache over."""
        return self._handles.keep(tenant, kv, ttl_s)

    async def info(self, handle: str, *, tenant: str = "") -> HandleInfo:
        """The state of a handle."""
        return self._handles.info(tenant, handle)

    def tokens(self, handle: str, *, tenant: str = "") -> Sequence[int]:
        """The tokens of a handle."""
        return self._handles.tokens(tenant, handle)

    async def owned(self, *, tenant: str = "") -> list[HandleInfo]:
        """All handles of a tenant."""
        return self._handles.owned(tenant)

    async def fork(self, handle: str, *, tenant: str = "", ttl_s: float | None = None) -> HandleInfo:
        """A second handle on the same content."""
        return self._handles.fork(tenant, handle, ttl_s)

    async def truncate(self, handle: str, length: int, *, tenant: str = "") -> HandleInfo:
        """Forget everything from `length` on."""
        return self._handles.truncate(tenant, handle, length)

    async def pin(self, handle: str, ttl_s: float, *, tenant: str = "") -> HandleInfo:
        """Keep a handle at least so long, and its KV before that of others."""
        return self._handles.pin(tenant, handle, ttl_s)

    async def delete(self, handle: str, *, tenant: str = "") -> None:
        """Forget a handle; where handles outlive the process, this waits a short time for the disk."""
        self._handles.delete(tenant, handle)
        await self._offload.run(FILES, self._handles.flush, _DELETE_WAIT_S, owner=owner_of(tenant))

    async def save(self, handle: str, path: str | os.PathLike[str], *, tenant: str = "") -> int:
        """Write a handle to a file, computing its KV first if that was evicted; returns its size in bytes."""
        loan = self._handles.lend(tenant, handle)
        kv = loan.kv
        if kv is None:
            kv = await self._compute(loan.tokens, tenant, self._handles.adapter_of(loan))
            self._handles.fill(tenant, handle, kv.fork())
        # A fork is written: the handle's KV may be evicted meanwhile. A thread that has begun closes it itself.
        return await asyncio.shield(self._write(tenant, kv, path))

    async def _write(self, tenant: str, kv: KVCache, path: str | os.PathLike[str]) -> int:
        try:
            return await self._offload.run(FILES, self._handles.write, tenant, kv, path, owner=owner_of(tenant))
        except QueueFull:  # it has not begun
            kv.close()
            raise

    async def restore(
        self, path: str | os.PathLike[str], *, tenant: str = "", ttl_s: float | None = None
    ) -> HandleInfo:
        """A handle from a file that `save` wrote for the same tenant and model."""
        return await self._offload.run(FILES, self._handles.restore, tenant, path, ttl_s, owner=owner_of(tenant))
