"""JSON answers."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def json_response(payload: dict[str, Any], status: int = 200) -> Response:
    """An answer that is not kept by anybody on the way."""
    return json_bytes(orjson.dumps(payload), status)


def json_bytes(body: bytes, status: int = 200) -> Response:
    """The same of what is JSON already."""
    return Response(body, status, {"cache-control": "no-store"}, "application/json")
