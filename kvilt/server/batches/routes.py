"""POST and GET /v1/batches, and cancelling."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from ..files.routes import BatchesDep, list_json, page_of
from ..http.responses import json_response
from ..http.routing import CallerDep, StrictRoute, error_responses
from .schema import BatchList, BatchObject, BatchRequest

router = APIRouter(route_class=StrictRoute, tags=["batches"])
_MADE: dict[int | str, dict[str, Any]] = {
    200: {"model": BatchObject},
    **error_responses(400, 404, 408, 409, 413, 415, 429),
}
_FOUND: dict[int | str, dict[str, Any]] = {200: {"model": BatchObject}, **error_responses(400, 404)}


@router.post("/v1/batches", response_model=None, responses=_MADE)
async def create(body: BatchRequest, batches: BatchesDep, caller: CallerDep) -> Response:
    """Answer the requests of a file."""
    return json_response((await batches.create(body, caller.tenant)).shown())


@router.get("/v1/batches", response_model=None, responses={200: {"model": BatchList}, **error_responses(400, 404)})
async def listed(
    batches: BatchesDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """The batches of the caller's key."""
    page, more = page_of(batches.batches(caller.tenant), after, limit)
    return json_response(list_json([one.shown() for one in page], more))


@router.get("/v1/batches/{name}", response_model=None, responses=_FOUND)
async def retrieve(name: str, batches: BatchesDep, caller: CallerDep) -> Response:
    """A batch."""
    return json_response(batches.find(name, caller.tenant).shown())


@router.post("/v1/batches/{name}/cancel", response_model=None, responses=_FOUND)
async def cancel(name: str, batches: BatchesDep, caller: CallerDep) -> Response:
    """End a batch; one that has ended stays as it is."""
    return json_response((await batches.cancel(name, caller.tenant)).shown())
