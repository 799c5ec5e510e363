"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Response

from ..http.responses import json_response
from ..http.routing import ServiceDep, StrictRoute, error_responses
from ..http.schema import ResponseModel
from ..service import Service


class ModelCard(ResponseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None  # an adapter's base model
    max_model_len: int


class ModelList(ResponseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


router = APIRouter(route_class=StrictRoute, tags=["models"])


@router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}, **error_responses()})
async def models(service: ServiceDep) -> Response:
    """The model under each of its names, and the loaded adapters."""
    adapters = [one.name for one in service.llm.executor.adapters.all()]
    return json_response(
        {"object": "list", "data": [_card(service, name) for name in (*service.config.names, *adapters)]}
    )


@router.get(
    "/v1/models/{name:path}", response_model=None, responses={200: {"model": ModelCard}, **error_responses(404)}
)
async def model(name: str, service: ServiceDep) -> Response:
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
