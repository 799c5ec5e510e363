"""Responses in JSON, and work that ends when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive

from .errors import ClientDisconnected


def json_response(payload: dict[str, Any], status: int = 200) -> Response:
    """A JSON response that proxies and browsers must not cache."""
    return json_bytes(orjson.dumps(payload), status)


def json_bytes(body: bytes, status: int = 200) -> Response:
    """The same for a body that is JSON already."""
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


Result = TypeVar("Result")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected()
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(BaseException):
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
