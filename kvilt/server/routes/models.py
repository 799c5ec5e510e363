"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from ..respond import json_response
from ..schema.answers import ModelCard, ModelList
from ..service import Service
from .common import Here, StrictRoute, refusals

router = APIRouter(route_class=StrictRoute, tags=["models"])


@router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}, **refusals()})
async def models(service: Here) -> Response:
    """All models, each under every name it answers to, and the adapters that are loaded."""
    adapters = [one.name for one in service.llm.executor.adapters.all()]
    return json_response(
        {"object": "list", "data": [_card(service, name) for name in (*service.config.names, *adapters)]}
    )


@router.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": ModelCard}, **refusals(404)})
async def model(name: str, service: Here) -> Response:
    """One model."""
    service.check_model(name)
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    own = name in service.config.names
    created_s = service.created_s if own else int(service.llm.executor.adapters.find(name).loaded_s)
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "kvilt",
        "root": service.model if own else name,
        "parent": None if own else service.model,
        "max_model_len": service.llm.executor.max_context,
    }
