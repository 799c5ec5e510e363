"""KV handles: make them, look at them, fork, cut, pin, save, restore and forget them."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Response

from ...kv.owner import owner_of
from ...llm.offload import FILES, PROMPT
from ..ask import messages_of
from ..gate import Caller
from ..keep import handle_of
from ..refusal import Refused
from ..respond import json_bytes, json_response
from ..schema.answers import Kept
from ..schema.kv import (
    CreateRequest,
    Deleted,
    ForkRequest,
    Handles,
    KVState,
    PinRequest,
    RestoreRequest,
    Saved,
    SavedList,
    SaveRequest,
    TruncateRequest,
)
from ..service import Service
from ..shelf import Shelf
from .common import ASKING, Here, Owner, StrictRoute, refusals

Result = TypeVar("Result")

router = APIRouter(route_class=StrictRoute, tags=["kv"])
_KEPT: dict[int | str, dict[str, Any]] = {200: {"model": Kept}, **ASKING}
_LOOK = refusals(400, 404, 410)


@router.post("/v1/kv", response_model=None, responses=_KEPT)
async def create(asked: CreateRequest, service: Here, caller: Owner) -> Response:
    """Compute the KV of a prompt or of messages, and name it."""
    lora = service.check_model(asked.model)
    messages, tools = await service.llm.offload.run(PROMPT, _conversation, asked, owner=owner_of(caller.tenant))
    made = await service.llm.kv.create(
        asked.prompt, messages=messages, tools=tools, tenant=caller.tenant, ttl_s=asked.ttl_s, lora=lora
    )
    return json_response(handle_of(made))


def _conversation(asked: CreateRequest) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]] | None]:
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()] or None
    return None if asked.messages is None else messages_of(asked.messages), tools


async def _files(service: Service, caller: Caller, work: Callable[..., Result], *given: str) -> Result:
    """Work on the caller's saved files."""
    return await service.llm.offload.run(FILES, work, *given, owner=owner_of(caller.tenant))


@router.get("/v1/kv", response_model=None, responses={200: {"model": Handles}, **_LOOK})
async def owned(service: Here, caller: Owner) -> Response:
    """All handles of the caller."""
    found = await service.llm.kv.owned(tenant=caller.tenant)
    return json_response({"object": "list", "data": [handle_of(info) for info in found]})


@router.get("/v1/kv/state", response_model=None, responses={200: {"model": KVState}, **_LOOK})
async def state(service: Here, caller: Owner) -> Response:
    """What the KV memory holds for the caller at this moment; those who ask again at once wait half a second."""
    return json_bytes(await service.snapshots.get(caller.tenant))


@router.get("/v1/kv/saved", response_model=None, responses={200: {"model": SavedList}, **_LOOK})
async def saved(service: Here, caller: Owner) -> Response:
    """All files of the caller."""
    files = await _files(service, caller, Shelf(service.config, caller).files)
    return json_response({"object": "list", "data": [{"name": name, "bytes": size} for name, size in files.items()]})


@router.delete("/v1/kv/saved/{name}", response_model=None, responses={200: {"model": Deleted}, **_LOOK})
async def unsave(name: str, service: Here, caller: Owner) -> Response:
    """Remove a file."""
    await _files(service, caller, Shelf(service.config, caller).delete, name)
    return json_response({"id": name, "deleted": True})


@router.post("/v1/kv/restore", response_model=None, responses=_KEPT)
async def restore(asked: RestoreRequest, service: Here, caller: Owner) -> Response:
    """A handle from a file."""
    path = await _files(service, caller, Shelf(service.config, caller).find, asked.name)
    return json_response(handle_of(await service.llm.kv.restore(path, tenant=caller.tenant, ttl_s=asked.ttl_s)))


@router.get("/v1/kv/{handle}", response_model=None, responses={200: {"model": Kept}, **_LOOK})
async def info(handle: str, service: Here, caller: Owner) -> Response:
    """One handle."""
    return json_response(handle_of(await service.llm.kv.info(handle, tenant=caller.tenant)))


@router.delete("/v1/kv/{handle}", response_model=None, responses={200: {"model": Deleted}, **_LOOK})
async def delete(handle: str, service: Here, caller: Owner) -> Response:
    """Forget a handle."""
    await service.llm.kv.delete(handle, tenant=caller.tenant)
    return json_response({"id": handle, "deleted": True})


@router.post("/v1/kv/{handle}/fork", response_model=None, responses=_KEPT)
async def fork(handle: str, asked: ForkRequest, service: Here, caller: Owner) -> Response:
    """A second handle on the same content; costs next to nothing."""
    return json_response(handle_of(await service.llm.kv.fork(handle, tenant=caller.tenant, ttl_s=asked.ttl_s)))


@router.post("/v1/kv/{handle}/truncate", response_model=None, responses=_KEPT)
async def truncate(handle: str, asked: TruncateRequest, service: Here, caller: Owner) -> Response:
    """Forget everything from a token on."""
    return json_response(handle_of(await service.llm.kv.truncate(handle, asked.length, tenant=caller.tenant)))


@router.post("/v1/kv/{handle}/pin", response_model=None, responses=_KEPT)
async def pin(handle: str, asked: PinRequest, service: Here, caller: Owner) -> Response:
    """Keep a handle longer, and its KV before that of others."""
    return json_response(handle_of(await service.llm.kv.pin(handle, asked.ttl_s, tenant=caller.tenant)))


@router.post("/v1/kv/{handle}/save", response_model=None, responses={200: {"model": Saved}, **ASKING})
async def save(handle: str, asked: SaveRequest, service: Here, caller: Owner) -> Response:
    """Write a handle's KV to a file; a client that leaves does not stop it half way."""
    await service.llm.kv.info(handle, tenant=caller.tenant)  # before a file is thought of
    return json_response(await asyncio.shield(_save(handle, asked.name, service, caller)))


async def _save(handle: str, name: str, service: Service, caller: Caller) -> dict[str, Any]:
    async with service.saving(caller):
        path = await _files(service, caller, Shelf(service.config, caller).place, name)
        try:
            size = await service.llm.kv.save(handle, path, tenant=caller.tenant)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise Refused(503, "the folder of saved KV cannot be written to now", code="kv_dir_full") from error
            raise
    return {"name": name, "bytes": size}
