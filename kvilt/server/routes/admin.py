"""Routes for the owner of a server, who has the admin key."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ...llm.offload import OWNER
from ..gate import check_admin
from ..respond import json_response
from ..schema.answers import Cleared
from .common import Here, StrictRoute, Who, refusals

router = APIRouter(route_class=StrictRoute, tags=["admin"])


@router.post("/reset_prefix_cache", response_model=None, responses={200: {"model": Cleared}, **refusals()})
async def reset_prefix_cache(service: Here, caller: Who) -> Response:
    """Forget every prefix, of every key, as before a measurement; handles and requests in progress keep their KV."""
    check_admin(caller)
    await service.llm.offload.run(OWNER, service.llm.executor.prefixes.clear)
    return json_response({"cleared": True})
