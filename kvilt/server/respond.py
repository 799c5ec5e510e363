"""JSON answers."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def json_response(payload: dict[str, Any], status: int = 200) -> Response:
    """An answer that is not kept by anybody on the way."""
    return Response(orjson.dumps(payload), status, {"cache-control": "no-store"}, "application/json")
