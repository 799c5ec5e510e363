"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for the owner of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response

from ...errors import AdapterUnknown, KviltError, ModelNotFound
from ...executor.lora import AdapterInfo
from ...llm.offload import OWNER
from ..gate import check_admin
from ..refusal import Refused
from ..respond import json_response
from ..schema.lora import LoadLora, LoraCard, UnloadLora
from ..service import Service
from .common import BODY, Here, StrictRoute, Who

router = APIRouter(route_class=StrictRoute, tags=["admin"])
_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"model": LoraCard}, **BODY}


@router.post("/v1/load_lora_adapter", response_model=None, responses=_ANSWERS)
async def load(asked: LoadLora, service: Here, caller: Who) -> Response:
    """Load an adapter; its name is then a model's."""
    check_admin(caller)
    return json_response(_card(await service.llm.offload.run(OWNER, _load, service, asked)))


@router.post("/v1/unload_lora_adapter", response_model=None, responses=_ANSWERS)
async def unload(asked: UnloadLora, service: Here, caller: Who) -> Response:
    """Unload an adapter; requests that run on it go on to their end."""
    check_admin(caller)
    adapters = service.llm.executor.adapters
    try:
        found = adapters.find(asked.lora_name)
        if asked.lora_int_id not in (None, found.id):
            raise AdapterUnknown(asked.lora_int_id)
        adapters.unload(found.id)
    except AdapterUnknown:
        raise Refused(404, "there is no such adapter", param="lora_name", code="model_not_found") from None
    return json_response(_card(found, deleted=True))


def _load(service: Service, asked: LoadLora) -> AdapterInfo:
    inside = service.config.lora_dir
    if inside is None:
        raise Refused(
            400, "this server loads no adapters; its owner can name a folder with --lora-dir", code="lora_dir_off"
        )
    service.check_new_name(asked.lora_name)
    adapters = service.llm.executor.adapters
    try:
        _check_path(asked.lora_path)
        lora_id = adapters.load(inside / asked.lora_path, asked.lora_name, inside)
        return adapters.find(lora_id)
    except ModelNotFound:  # its message has the whole path
        message = "lora_path: there is no adapter in such a folder"
        raise Refused(404, message, param="lora_path", code="lora_not_found") from None
    except Refused:
        raise
    except KviltError as error:  # of the files, named by tensor or field
        raise Refused(400, str(error), param="lora_path", code="lora_refused") from None


def _check_path(path: str) -> None:
    parts = Path(path).parts
    if "\0" in path or Path(path).is_absolute() or ".." in parts:
        message = "lora_path: give the path of a folder inside the server's own, without .."
        raise Refused(400, message, param="lora_path", code="bad_path")


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
