"""Routes that operate a server: health and metrics, the prefix cache, LoRA adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from .. import __version__
from ..errors import AdapterUnknown, KviltError, ModelNotFound
from ..executor.adapter_info import AdapterInfo
from ..llm.offload import OWNER
from .auth import check_admin, check_metrics
from .http.errors import HTTPError
from .http.responses import json_response
from .http.routing import BODY_ERRORS, CallerDep, ServiceDep, StrictRoute, error_responses
from .http.schema import Error, RequestModel, ResponseModel
from .metrics import CONTENT_TYPE
from .service import Service


class Health(ResponseModel):
    """The state of the server."""

    status: Literal["ok", "draining", "hung", "failed"]


class Version(ResponseModel):
    """The version of kvilt."""

    version: str


class PrefixCacheReset(ResponseModel):
    """The prefix cache was emptied."""

    cleared: bool


Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadLora(RequestModel):
    """An adapter to load."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Its PEFT folder, inside the folder of --lora-dir."
    )


class UnloadLora(RequestModel):
    """An adapter to unload; requests in progress keep it until they end."""

    lora_name: Name
    lora_int_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class LoraCard(ResponseModel):
    """An adapter."""

    object: Literal["lora"]
    id: str
    lora_int_id: int
    content: str
    rank: int
    targets: list[str]
    bytes: int
    deleted: bool


router = APIRouter(route_class=StrictRoute, tags=["admin"])


@router.post(
    "/reset_prefix_cache", response_model=None, responses={200: {"model": PrefixCacheReset}, **error_responses()}
)
async def reset_prefix_cache(service: ServiceDep, caller: CallerDep) -> Response:
    """Empty the prefix cache of all keys, as before a measurement; handles and requests in progress keep their KV."""
    check_admin(caller)
    await service.llm.offload.run(OWNER, service.llm.executor.prefixes.clear)
    return json_response({"cleared": True})


_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"model": LoraCard}, **BODY_ERRORS}


@router.post("/v1/load_lora_adapter", response_model=None, responses=_ANSWERS)
async def load(body: LoadLora, service: ServiceDep, caller: CallerDep) -> Response:
    """Load an adapter; requests then use its name as the model."""
    check_admin(caller)
    return json_response(_card(await service.llm.offload.run(OWNER, _load, service, body)))


@router.post("/v1/unload_lora_adapter", response_model=None, responses=_ANSWERS)
async def unload(body: UnloadLora, service: ServiceDep, caller: CallerDep) -> Response:
    """Unload an adapter; requests in progress keep it until they end."""
    check_admin(caller)
    adapters = service.llm.executor.adapters
    try:
        found = adapters.find(body.lora_name)
        if body.lora_int_id not in (None, found.id):
            raise AdapterUnknown(body.lora_int_id)
        adapters.unload(found.id)
    except AdapterUnknown:
        raise HTTPError(404, "there is no such adapter", param="lora_name", code="model_not_found") from None
    return json_response(_card(found, deleted=True))


def _load(service: Service, body: LoadLora) -> AdapterInfo:
    inside = service.config.lora_dir
    if inside is None:
        raise HTTPError(
            400, "this server loads no adapters; its owner can name a folder with --lora-dir", code="lora_dir_off"
        )
    service.check_new_name(body.lora_name)
    adapters = service.llm.executor.adapters
    try:
        _check_path(body.lora_path)
        lora_id = adapters.load(inside / body.lora_path, body.lora_name, inside)
        return adapters.find(lora_id)
    except ModelNotFound:  # its message contains the whole path
        message = "lora_path: there is no adapter in such a folder"
        raise HTTPError(404, message, param="lora_path", code="lora_not_found") from None
    except HTTPError:
        raise
    except KviltError as error:  # of the files, named by tensor or field
        raise HTTPError(400, str(error), param="lora_path", code="lora_refused") from None


def _check_path(path: str) -> None:
    parts = Path(path).parts
    if "\0" in path or Path(path).is_absolute() or ".." in parts:
        message = "lora_path: give the path of a folder inside the server's own, without .."
        raise HTTPError(400, message, param="lora_path", code="bad_path")


def _card(info: AdapterInfo, deleted: bool = False) -> dict[str, Any]:
    return {
        "object": "lora",
        "id": info.name,
        "lora_int_id": info.id,
        "content": info.content,
        "rank": info.rank,
        "targets": list(info.parts),
        "bytes": info.nbytes,
        "deleted": deleted,
    }


health_router = APIRouter(route_class=StrictRoute, tags=["server"])
_STATES = {200: {"model": Health}, 403: {"model": Error}, 503: {"model": Health}}


@health_router.get("/health", response_model=None, responses=_STATES)  # type: ignore[arg-type]
async def health(service: ServiceDep) -> Response:
    """Whether the engine makes progress: 503 while a step hangs, and once a process that has a part of it is gone."""
    healthy = service.llm.healthy
    return json_response({"status": "ok" if healthy else _why_not(service)}, 200 if healthy else 503)


def _why_not(service: ServiceDep) -> str:
    return "hung" if service.llm.executor.failure is None else "failed"


@health_router.get("/ready", response_model=None, responses=_STATES)  # type: ignore[arg-type]
async def ready(service: ServiceDep) -> Response:
    """Whether new requests are accepted: 503 while the server shuts down or a step hangs."""
    if not service.llm.healthy:
        return json_response({"status": _why_not(service)}, 503)
    open_ = service.llm.accepting and not service.draining
    return json_response({"status": "ok" if open_ else "draining"}, 200 if open_ else 503)


@health_router.get("/version", response_model=None, responses={200: {"model": Version}, **error_responses()})
async def version() -> Response:
    """The version of kvilt."""
    return json_response({"version": __version__})


_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@health_router.get(
    "/metrics", response_class=PlainTextResponse, response_model=None, responses=_TEXT | error_responses()
)
async def metrics(service: ServiceDep, caller: CallerDep) -> Response:
    """All metrics in the Prometheus format. Where keys are set, the admin key is needed: metrics cover all keys."""
    check_metrics(caller, service.config)
    return Response(service.exposition(), 200, media_type=CONTENT_TYPE)
