"""Routes of the page's conversations: list and search, read, write, rename, delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Response

from ...kv.owner import owner_of
from ...llm.offload import FILES
from ..auth import Caller
from ..http.responses import json_response
from ..http.routing import BODY_ERRORS, SaltedCallerDep, ServiceDep, StrictRoute, error_responses
from ..kv.schema import Deleted
from ..service import Service
from .schema import ChatList, ChatObject, ChatSummary, RenameChatRequest, SaveChatRequest

router = APIRouter(route_class=StrictRoute, tags=["chats"])
_LOOK = error_responses(400, 404)
_WRITTEN: dict[int | str, dict[str, Any]] = {200: {"model": ChatSummary}, **BODY_ERRORS, **error_responses(409)}
Result = TypeVar("Result")


async def _done(service: Service, caller: Caller, work: Callable[..., Result], *given: Any) -> Result:
    """Work on files, in a thread."""
    return await service.llm.offload.run(FILES, work, caller.tenant, *given, owner=owner_of(caller.tenant))


@router.get("/v1/chats", response_model=None, responses={200: {"model": ChatList}, **error_responses(400)})
async def owned(
    service: ServiceDep, caller: SaltedCallerDep, q: Annotated[str, Query(max_length=200)] = ""
) -> Response:
    """The conversations of the caller, the newest first; with `q`, those whose title or text has all of its words."""
    found = await _done(service, caller, service.chats.chats, q)
    shown = [info.shown() for info in found]
    return json_response({"object": "list", "kept": service.chats.keeps, "data": shown})


@router.get("/v1/chats/{name}", response_model=None, responses={200: {"model": ChatObject}, **_LOOK})
async def load(name: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """A conversation."""
    found = await _done(service, caller, service.chats.load, name)
    return json_response({**found.info.shown(), "conversation": found.conversation})


@router.put("/v1/chats/{name}", response_model=None, responses=_WRITTEN)
async def save(name: str, body: SaveChatRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Write a conversation. One that was written by another page since `revision` is not overwritten."""
    given = (name, body.title, body.conversation, body.revision)
    return json_response((await _done(service, caller, service.chats.save, *given)).shown())


@router.post("/v1/chats/{name}", response_model=None, responses={200: {"model": ChatSummary}, **BODY_ERRORS})
async def rename(name: str, body: RenameChatRequest, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Give a conversation another title."""
    return json_response((await _done(service, caller, service.chats.rename, name, body.title)).shown())


@router.delete("/v1/chats/{name}", response_model=None, responses={200: {"model": Deleted}, **_LOOK})
async def delete(name: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Remove a conversation."""
    await _done(service, caller, service.chats.delete, name)
    return json_response({"id": name, "deleted": True})
