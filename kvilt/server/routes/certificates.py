"""GET /v1/kv/certificates: what the quality gate has learnt of blending."""

from __future__ import annotations

import math
from typing import Any

from fastapi import APIRouter, Response

from ...blend.certificate import Certificate
from ..respond import json_response
from ..schema.kv import Certificates
from .common import Here, StrictRoute, refusals

router = APIRouter(route_class=StrictRoute, tags=["kv"])
_SAME = ("model", "adapter", "strategy", "asked", "asked_ratio", "ratio", "falls_back", "count")
_MEASURED = ("mean_kl", "kl_bound", "agreement")


@router.get("/v1/kv/certificates", response_model=None, responses={200: {"model": Certificates}, **refusals()})
async def certificates(service: Here) -> Response:
    """What blending costs, for each recipe that was asked for; those of all keys together."""
    return json_response({"object": "list", "data": [_shown(one) for one in service.llm.certificates()]})


def _shown(known: Certificate) -> dict[str, Any]:
    """A certificate without its single comparisons, which are of other keys' prompts."""
    measured = {name: getattr(known, name) for name in _MEASURED}
    return {
        **{name: getattr(known, name) for name in _SAME},
        "compared": len(known.recent),
        **{name: value if math.isfinite(value) else None for name, value in measured.items()},
    }
