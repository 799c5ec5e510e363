"""Routes of KV: handles, saved files, stored chunks of documents, and certificates of blending."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import math
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from ...blend.certificate import Certificate
from ...errors import ParamError
from ...kv.owner import owner_of
from ...llm.offload import FILES, PROMPT
from ...llm.replace import DEFAULT_REPAIR
from ..auth import Caller
from ..http.errors import HTTPError
from ..http.event_stream import EventStream
from ..http.responses import json_bytes, json_response
from ..http.routing import GENERATION_ERRORS, SaltedCallerDep, ServiceDep, StrictRoute, error_responses
from ..openai.params import check_document_count, document_texts, template_messages
from ..service import Service
from .handles import SavedKVFolder, handle_json
from .schema import (
    BlendCertificateList,
    ChunkList,
    ChunksRequest,
    CreateRequest,
    Deleted,
    ForkRequest,
    KVHandle,
    KVHandleList,
    KVState,
    PinRequest,
    ReplacedKVHandle,
    ReplaceSpanRequest,
    RestoreRequest,
    SavedKV,
    SavedKVList,
    SaveRequest,
    TruncateRequest,
)
from .state_stream import KVStateStream, wants_events

router = APIRouter(route_class=StrictRoute, tags=["kv"])
_OK: dict[int | str, dict[str, Any]] = {200: {"model": ChunkList}, **GENERATION_ERRORS}


@router.post("/v1/kv/chunks", response_model=None, responses=_OK)
async def warm(body: ChunksRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Compute documents that are not stored yet, and store them for the caller's requests."""
    lora = service.check_model(body.model)
    if body.lora_scale is not None and lora is None:
        raise ParamError("lora_scale", "is for adapters; name one as the model")
    check_document_count(service.config, len(body.documents))
    scale = 1.0 if body.lora_scale is None else body.lora_scale
    found = await service.llm.warm(document_texts(body.documents), tenant=caller.tenant, lora=lora, lora_scale=scale)
    return json_response({"object": "list", "data": [dataclasses.asdict(one) for one in found]})


_SAME = ("model", "adapter", "strategy", "asked", "asked_ratio", "ratio", "falls_back", "count")
_MEASURED = ("mean_kl", "kl_bound", "agreement")


@router.get(
    "/v1/kv/certificates", response_model=None, responses={200: {"model": BlendCertificateList}, **error_responses()}
)
async def certificates(service: ServiceDep) -> Response:
    """Measured quality of blending for each requested recipe, over all keys together."""
    return json_response({"object": "list", "data": [_shown(one) for one in service.llm.certificates()]})


def _shown(known: Certificate) -> dict[str, Any]:
    """A certificate without its single comparisons: they come from prompts of other keys."""
    measured = {name: getattr(known, name) for name in _MEASURED}
    return {
        **{name: getattr(known, name) for name in _SAME},
        "compared": len(known.recent),
        **{name: value if math.isfinite(value) else None for name, value in measured.items()},
    }


Result = TypeVar("Result")
_KEPT: dict[int | str, dict[str, Any]] = {200: {"model": KVHandle}, **GENERATION_ERRORS}
_LOOK = error_responses(400, 404, 410)


@router.post("/v1/kv", response_model=None, responses=_KEPT)
async def create(body: CreateRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Compute the KV of a prompt or of messages, and keep it as a handle."""
    lora = service.check_model(body.model)
    messages, tools = await service.llm.offload.run(PROMPT, _conversation, body, owner=owner_of(caller.tenant))
    made = await service.llm.kv.create(
        body.prompt,
        messages=messages,
        tools=tools,
        chat_template_kwargs=body.chat_template_kwargs,
        tenant=caller.tenant,
        ttl_s=body.ttl_s,
        lora=lora,
    )
    return json_response(handle_json(made))


def _conversation(body: CreateRequest) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]] | None]:
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
    return None if body.messages is None else template_messages(body.messages), tools


async def _files(service: Service, caller: Caller, work: Callable[..., Result], *given: str) -> Result:
    """Work on the caller's saved files."""
    return await service.llm.offload.run(FILES, work, *given, owner=owner_of(caller.tenant))


@router.get("/v1/kv", response_model=None, responses={200: {"model": KVHandleList}, **_LOOK})
async def owned(service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """All handles of the caller."""
    found = await service.llm.kv.owned(tenant=caller.tenant)
    return json_response({"object": "list", "data": [handle_json(info) for info in found]})


@router.get("/v1/kv/state", response_model=None, responses={200: {"model": KVState}, **_LOOK})
async def state(request: Request, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """What the KV memory holds for the caller now; a caller gets at most two snapshots a second.

    A client that accepts `text/event-stream` gets a snapshot every second as a stream of events.
    """
    if wants_events(request.headers.get("accept", "")):
        return EventStream(KVStateStream(service, caller), service.config.keep_alive_s)
    return json_bytes(await service.snapshots.get(caller.tenant))


@router.get("/v1/kv/saved", response_model=None, responses={200: {"model": SavedKVList}, **_LOOK})
async def saved(service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """All files of the caller."""
    files = await _files(service, caller, SavedKVFolder(service.config, caller).files)
    return json_response({"object": "list", "data": [{"name": name, "bytes": size} for name, size in files.items()]})


@router.delete("/v1/kv/saved/{name}", response_model=None, responses={200: {"model": Deleted}, **_LOOK})
async def unsave(name: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Remove a file."""
    await _files(service, caller, SavedKVFolder(service.config, caller).delete, name)
    return json_response({"id": name, "deleted": True})


@router.post("/v1/kv/restore", response_model=None, responses=_KEPT)
async def restore(body: RestoreRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """A handle from a file."""
    path = await _files(service, caller, SavedKVFolder(service.config, caller).find, body.name)
    return json_response(handle_json(await service.llm.kv.restore(path, tenant=caller.tenant, ttl_s=body.ttl_s)))


@router.get("/v1/kv/{handle}", response_model=None, responses={200: {"model": KVHandle}, **_LOOK})
async def info(handle: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """One handle."""
    return json_response(handle_json(await service.llm.kv.info(handle, tenant=caller.tenant)))


@router.delete("/v1/kv/{handle}", response_model=None, responses={200: {"model": Deleted}, **_LOOK})
async def delete(handle: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Forget a handle."""
    await service.llm.kv.delete(handle, tenant=caller.tenant)
    return json_response({"id": handle, "deleted": True})


@router.post("/v1/kv/{handle}/fork", response_model=None, responses=_KEPT)
async def fork(handle: str, body: ForkRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """A second handle on the same content; the pages are shared."""
    return json_response(handle_json(await service.llm.kv.fork(handle, tenant=caller.tenant, ttl_s=body.ttl_s)))


@router.post("/v1/kv/{handle}/truncate", response_model=None, responses=_KEPT)
async def truncate(handle: str, body: TruncateRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Drop the tokens of a handle from a position on."""
    return json_response(handle_json(await service.llm.kv.truncate(handle, body.length, tenant=caller.tenant)))


@router.post(
    "/v1/kv/{handle}/replace", response_model=None, responses={200: {"model": ReplacedKVHandle}, **GENERATION_ERRORS}
)
async def replace(handle: str, body: ReplaceSpanRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """A new handle with a span dropped or swapped: what stands behind is moved and repaired, or computed again."""
    if body.tokens is not None and body.text is not None:
        raise ParamError("text", "stands beside tokens; give one of them")
    repair = DEFAULT_REPAIR if body.repair is None else body.repair
    new = body.text if body.text is not None else body.tokens or []
    made = await service.llm.kv.replace(
        handle, body.start, body.stop, new, repair=repair, tenant=caller.tenant, ttl_s=body.ttl_s
    )
    return json_response({**handle_json(made.info), "origin": made.origin})


@router.post("/v1/kv/{handle}/pin", response_model=None, responses=_KEPT)
async def pin(handle: str, body: PinRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Keep a handle longer, and evict its KV after that of other handles."""
    return json_response(handle_json(await service.llm.kv.pin(handle, body.ttl_s, tenant=caller.tenant)))


@router.post("/v1/kv/{handle}/save", response_model=None, responses={200: {"model": SavedKV}, **GENERATION_ERRORS})
async def save(handle: str, body: SaveRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Write a handle's KV to a file; a disconnect does not stop the write."""
    await service.llm.kv.info(handle, tenant=caller.tenant)  # an unknown handle is refused before files are looked at
    return json_response(await asyncio.shield(_save(handle, body.name, service, caller)))


async def _save(handle: str, name: str, service: Service, caller: Caller) -> dict[str, Any]:
    async with service.saving(caller):
        path = await _files(service, caller, SavedKVFolder(service.config, caller).place, name)
        try:
            size = await service.llm.kv.save(handle, path, tenant=caller.tenant)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise HTTPError(503, "the folder of saved KV cannot be written to now", code="kv_dir_full") from error
            raise
    return {"name": name, "bytes": size}
