"""Routes of sessions: list, look, fork, delete, and a session as a file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ...engine.sessions.session import SessionInfo
from ...kv.owner import owner_of
from ...llm.offload import FILES
from ..http.responses import json_response
from ..http.routing import BODY_ERRORS, SaltedCallerDep, ServiceDep, StrictRoute, error_responses
from ..kv.schema import Deleted
from .fields import IMPORT_PATH, Lifetime, SessionName
from .schema import ExportHandlesRequest, ForkSessionRequest, SessionList, SessionObject

router = APIRouter(route_class=StrictRoute, tags=["sessions"])
_DELETE_WAIT_S = 2.0  # for the disk, so that a deleted session stays deleted if the process is killed right after
_LOOK = error_responses(400, 404)
_ONE: dict[int | str, dict[str, Any]] = {200: {"model": SessionObject}, **BODY_ERRORS}
_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.get("/v1/sessions", response_model=None, responses={200: {"model": SessionList}, **_LOOK})
async def owned(service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """All sessions of the caller."""
    found = service.llm.sessions.owned(caller.tenant)
    return json_response({"object": "list", "data": [_summary(info) for info in found]})


@router.post(
    IMPORT_PATH,
    response_model=None,
    responses=_ONE,
    openapi_extra={"requestBody": {"content": _BYTES, "required": True}},
)
async def load(
    request: Request,
    service: ServiceDep,
    caller: SaltedCallerDep,
    name: Annotated[SessionName | None, Query()] = None,
    ttl_s: Annotated[Lifetime | None, Query()] = None,
) -> Response:
    """Add a session from a file, and say whether its KV is used or computed again."""
    data = await request.body()
    work = service.llm.exchange.load
    made = await service.llm.offload.run(FILES, work, caller.tenant, data, name, ttl_s, owner=owner_of(caller.tenant))
    shown = {**_shown(made.session), "kv": made.kv, "why": made.why or None}
    return json_response({**shown, "conversation": made.conversation or None})


@router.post(
    "/v1/sessions/export",
    response_model=None,
    response_class=Response,
    responses={200: {"content": _BYTES, "description": "The file."}, **BODY_ERRORS, **error_responses(410)},
)
async def export_handles(body: ExportHandlesRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """What KV handles hold, as the file of a session whose turns they are."""
    given = (caller.tenant, body.name, body.kv, body.conversation)
    work = service.llm.exchange.export_handles
    data = await service.llm.offload.run(FILES, work, *given, owner=owner_of(caller.tenant))
    return Response(data, media_type="application/octet-stream")


@router.get("/v1/sessions/{name}", response_model=None, responses={200: {"model": SessionObject}, **_LOOK})
async def info(name: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """A session with its tree, by its id or its name."""
    found = service.llm.sessions.info(caller.tenant, name)
    return json_response(
        {**_shown(found), "volatile_lines": service.stable_prompts.volatile(caller.tenant, found.name)}
    )


@router.delete("/v1/sessions/{name}", response_model=None, responses={200: {"model": Deleted}, **_LOOK})
async def delete(name: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Forget a session, its KV, and its note where there is a store."""
    sessions = service.llm.sessions
    sessions.delete(caller.tenant, name)
    await service.llm.offload.run(FILES, sessions.flush, _DELETE_WAIT_S, owner=owner_of(caller.tenant))
    return json_response({"id": name, "deleted": True})


@router.post("/v1/sessions/{name}/fork", response_model=None, responses=_ONE)
async def fork(name: str, body: ForkSessionRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """A second session with the same turns, or with those that lead to one of them; pages are shared."""
    made = service.llm.sessions.fork(caller.tenant, name, body.name, body.turn, body.ttl_s)
    return json_response(_shown(made))


@router.get(
    "/v1/sessions/{name}/export",
    response_model=None,
    response_class=Response,
    responses={200: {"content": _BYTES, "description": "The file."}, **error_responses(400, 404, 429)},
)
async def export(name: str, service: ServiceDep, caller: SaltedCallerDep, kv: bool = True) -> Response:
    """A session as a file: tokens, tree and text, the model's identity, and its KV unless that is not wanted."""
    work = service.llm.exchange.export
    data = await service.llm.offload.run(FILES, work, caller.tenant, name, kv, owner=owner_of(caller.tenant))
    return Response(data, media_type="application/octet-stream")


def _shown(info: SessionInfo) -> dict[str, Any]:
    return {"object": "session", **asdict(info)}


def _summary(info: SessionInfo) -> dict[str, Any]:
    resident = sum(turn.resident for turn in info.turns)
    return {**_shown(info), "turns": len(info.turns), "resident_turns": resident}
