"""GET /v1/models and /v1/models/{id}, in OpenAI's format, or in Anthropic's for clients that say so."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Response

from ..anthropic.answers import AnthropicModel, AnthropicModelList
from ..anthropic.models import anthropic_model, anthropic_models
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
    sampling_defaults: dict[str, float]  # what `kvilt run`, `kvilt chat` and the page use; the API's own are OpenAI's


class ModelList(ResponseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


router = APIRouter(route_class=StrictRoute, tags=["models"])
# Anthropic's clients send this header with every request.
AnthropicVersion = Annotated[str | None, Header(description="Asks for Anthropic's format.")]
_ALL: dict[int | str, dict[str, Any]] = {200: {"model": ModelList | AnthropicModelList}}
_ONE: dict[int | str, dict[str, Any]] = {200: {"model": ModelCard | AnthropicModel}}


@router.get("/v1/models", response_model=None, responses=_ALL | error_responses())
async def models(service: ServiceDep, anthropic_version: AnthropicVersion = None) -> Response:
    """The model under each of its names, and the loaded adapters."""
    adapters = [one.name for one in service.llm.executor.adapters.all()]
    cards = [_card(service, name) for name in (*service.config.names, *adapters)]
    if anthropic_version is not None:
        return json_response(anthropic_models(service, cards))
    return json_response({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}", response_model=None, responses=_ONE | error_responses(404))
async def model(name: str, service: ServiceDep, anthropic_version: AnthropicVersion = None) -> Response:
    """One model."""
    card = _card(service, name)
    return json_response(card if anthropic_version is None else anthropic_model(service, card))


def _card(service: Service, name: str) -> dict[str, Any]:
    lora = service.check_model(name)
    created_s = service.created_s if lora is None else int(service.llm.executor.adapters.find(lora).loaded_s)
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "kvilt",
        "root": service.model if lora is None else name,
        "parent": None if lora is None else service.model,
        "max_model_len": service.llm.executor.max_context,
        "sampling_defaults": service.llm.sampling_defaults.fields,
    }
