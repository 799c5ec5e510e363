"""GET /health, /ready, /version and /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from ... import __version__
from ..gate import check_metrics
from ..prometheus import CONTENT_TYPE
from ..respond import json_response
from ..schema.answers import Error, Health, Version
from .common import Here, StrictRoute, Who, refusals

router = APIRouter(route_class=StrictRoute, tags=["server"])
_STATES = {200: {"model": Health}, 403: {"model": Error}, 503: {"model": Health}}


@router.get("/health", response_model=None, responses=_STATES)  # type: ignore[arg-type]
async def health(service: Here) -> Response:
    """Whether the process does its work: 503 while a step hangs."""
    healthy = service.llm.healthy
    return json_response({"status": "ok" if healthy else "hung"}, 200 if healthy else 503)


@router.get("/ready", response_model=None, responses=_STATES)  # type: ignore[arg-type]
async def ready(service: Here) -> Response:
    """Whether new requests are taken: 503 while the server shuts down or a step hangs."""
    if not service.llm.healthy:
        return json_response({"status": "hung"}, 503)
    open_ = service.llm.accepting and not service.draining
    return json_response({"status": "ok" if open_ else "draining"}, 200 if open_ else 503)


@router.get("/version", response_model=None, responses={200: {"model": Version}, **refusals()})
async def version() -> Response:
    """Which kvilt this is."""
    return json_response({"version": __version__})


_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/metrics", response_class=PlainTextResponse, response_model=None, responses=_TEXT | refusals())
async def metrics(service: Here, caller: Who) -> Response:
    """Everything that is counted, for Prometheus. Where keys are set, it is the owner's: it tells of all keys."""
    check_metrics(caller, service.config)
    return Response(service.exposition(), 200, media_type=CONTENT_TYPE)
