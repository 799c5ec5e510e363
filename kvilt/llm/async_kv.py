"""Named KV handles for event loops: the verbs of `Handles`, and the computing that some of them need."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ..batch import Adapter
from ..engine.admission import BorrowedKV
from ..engine.handles.handles import HandleInfo, Handles
from ..engine.request import Request
from ..errors import InputError, QueueFull
from ..kv.cache import KVCache
from ..kv.owner import owner_of
from .model import AdapterChoice, Message, Prompt
from .offload import FILES, PROMPT, Offload
from .replace import DEFAULT_REPAIR, ReplacedHandle, ReplaceRequest, SpanReplacement, replace_request

_NOTE_WAIT_S = 2.0  # how long a change waits until it is noted, and a delete until the note is gone


class ChatIds(Protocol):
    """Messages, and perhaps tools, as tokens."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        answers: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


class KVOfRequest(Protocol):
    """Computes the KV of a request that keeps it; owns the borrowed cache."""

    def __call__(self, request: Request, borrowed: BorrowedKV | None = None) -> Awaitable[KVCache]: ...


class AsyncKV:
    """The handles of an `AsyncLLM`. A handle that a tenant does not own does not exist for it."""

    def __init__(
        self,
        handles: Handles,
        prompt_ids: Callable[..., list[int]],
        chat_ids: ChatIds,
        compute: Callable[[Sequence[int], str, Adapter], Awaitable[KVCache]],
        kv_of: KVOfRequest,
        adapter: Callable[[AdapterChoice, Sequence[int]], Adapter],
        offload: Offload,
    ) -> None:
        self._handles = handles
        self._prompt_ids = prompt_ids
        self._chat_ids = chat_ids
        self._compute = compute
        self._kv_of = kv_of
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
        return await self._noted(tenant, self._handles.keep(tenant, await self._compute(ids, tenant, adapter), ttl_s))

    async def keep(self, kv: KVCache, *, tenant: str = "", ttl_s: float | None = None) -> HandleInfo:
        """A handle on the KV that a completion kept; takes the cache over."""
        return await self._noted(tenant, self._handles.keep(tenant, kv, ttl_s))

    async def info(self, handle: str, *, tenant: str = "") -> HandleInfo:
        """The state of a handle."""
        return self._handles.info(tenant, handle)

    def held_since(self, handle: str, *, tenant: str = "") -> float | None:
        """When a handle that is here was last used, by the calendar; None where it is not here."""
        return self._handles.held_since(tenant, handle)

    def tokens(self, handle: str, *, tenant: str = "") -> Sequence[int]:
        """The tokens of a handle."""
        return self._handles.tokens(tenant, handle)

    async def owned(self, *, tenant: str = "") -> list[HandleInfo]:
        """All handles of a tenant."""
        return self._handles.owned(tenant)

    async def fork(self, handle: str, *, tenant: str = "", ttl_s: float | None = None) -> HandleInfo:
        """A second handle on the same content."""
        return await self._noted(tenant, self._handles.fork(tenant, handle, ttl_s))

    async def truncate(self, handle: str, length: int, *, tenant: str = "") -> HandleInfo:
        """Forget everything from `length` on."""
        return await self._noted(tenant, self._handles.truncate(tenant, handle, length))

    async def replace(
        self,
        handle: str,
        start: int,
        stop: int,
        new_tokens: Prompt = (),
        *,
        repair: float = DEFAULT_REPAIR,
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> ReplacedHandle:
        """A new handle with new tokens in place of the tokens [start, stop) of a handle, which stays as it is.

        See `LLM.replace`.
        """
        loan = self._handles.lend(tenant, handle)
        adapter = self._handles.adapter_of(loan)
        kv = loan.kv or await self._compute(loan.tokens, tenant, adapter)
        work = partial(self._replace_request, kv, start, stop, new_tokens, repair, adapter, tenant)
        try:
            made = await self._offload.run(PROMPT, work, owner=owner_of(tenant), discard=ReplaceRequest.leave)
        finally:
            kv.close()
        done = await self._kv_of(made.request, made.borrowed)
        origin = done.origin
        return ReplacedHandle(await self._noted(tenant, self._handles.keep(tenant, done, ttl_s)), origin)

    def _replace_request(
        self, kv: KVCache, start: int, stop: int, new_tokens: Prompt, repair: float, adapter: Adapter, tenant: str
    ) -> ReplaceRequest:
        ids = self._prompt_ids(new_tokens, False) if len(new_tokens) else []
        self._handles.check_room(tenant, kv.num_entries + len(ids))
        with kv.fork() as own:
            replacement = SpanReplacement(start, stop, tuple(ids), repair)
            return replace_request(own, replacement, adapter, exact=True, tenant=tenant)

    async def pin(self, handle: str, ttl_s: float, *, tenant: str = "") -> HandleInfo:
        """Keep a handle at least so long, and its KV before that of others."""
        return await self._noted(tenant, self._handles.pin(tenant, handle, ttl_s))

    async def delete(self, handle: str, *, tenant: str = "") -> None:
        """Forget a handle; where handles outlive the process, this waits a short time for the disk."""
        self._handles.delete(tenant, handle)
        await self._offload.run(FILES, self._handles.flush, _NOTE_WAIT_S, owner=owner_of(tenant))

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
        done = await self._offload.run(FILES, self._handles.restore, tenant, path, ttl_s, owner=owner_of(tenant))
        return await self._noted(tenant, done)

    async def _noted(self, tenant: str, done: HandleInfo) -> HandleInfo:
        """Wait a short time until a change is noted, where other processes go on with handles of this one."""
        if self._handles.shares_notes:
            await self._offload.run(FILES, self._handles.flush, _NOTE_WAIT_S, owner=owner_of(tenant))
        return done
