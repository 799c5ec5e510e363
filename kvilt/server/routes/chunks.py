"""POST /v1/kv/chunks: documents computed and stored before somebody asks about them."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Response

from ...errors import ParamError
from ..documents import check_count, texts_of
from ..respond import json_response
from ..schema.kv import Chunks, ChunksRequest
from .common import ASKING, Here, Owner, StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["kv"])
_OK: dict[int | str, dict[str, Any]] = {200: {"model": Chunks}, **ASKING}


@router.post("/v1/kv/chunks", response_model=None, responses=_OK)
async def warm(asked: ChunksRequest, service: Here, caller: Owner) -> Response:
    """Compute documents that are not stored yet, and store them for the caller's requests."""
    lora = service.check_model(asked.model)
    if asked.lora_scale is not None and lora is None:
        raise ParamError("lora_scale", "is for adapters; name one as the model")
    check_count(service.config, len(asked.documents))
    scale = 1.0 if asked.lora_scale is None else asked.lora_scale
    found = await service.llm.warm(texts_of(asked.documents), tenant=caller.tenant, lora=lora, lora_scale=scale)
    return json_response({"object": "list", "data": [dataclasses.asdict(one) for one in found]})
