"""Bodies of requests: read within limits of size and time, and as JSON of which nobody can be in doubt."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from ..llm.offload import PARSE, Offload
from .refusal import ClientGone, Refused
from .strict_json import MAX_VALUES, JSONRefused, TooManyValues, read_json

_SMALL = 1 << 12  # bytes of a body that is read at once: it takes less than a thread
_READ = b"{}"  # stands for a body that was read


class Limited:
    """A request's `receive` that refuses bodies which are too long or come too slowly."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._until_s = time.monotonic() + timeout_s
        self.whole = False  # all of it was read

    async def __call__(self) -> Message:
        if self.whole:
            return await self._receive()  # only the end of the connection is left to hear of
        try:
            async with asyncio.timeout(max(0.0, self._until_s - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise Refused(408, "the body did not come in time", code="slow_body", headers=_CLOSE) from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            self.whole = not message.get("more_body", False)
            if self._left < 0:
                raise too_large(self._max_bytes)
        return message


_CLOSE = {"connection": "close"}


def too_large(limit: int) -> Refused:
    """A body over the limit."""
    return Refused(413, f"the body is larger than {limit} bytes", code="body_too_large", headers=_CLOSE)


class StrictRequest(Request):
    """A request whose body is read and checked before FastAPI sees it, off the event loop unless it is small."""

    body_bytes = 0  # as they came

    async def read(self) -> None:
        """Wait for the whole body."""
        try:
            self.body_bytes = len(await self.body())
        except ClientDisconnect:
            raise ClientGone() from None

    async def check(self, shape: TypeAdapter[Any] | None, offload: Offload, owner: str) -> None:
        """Check the body against the route's shape; afterwards the request holds the value alone."""
        body = await self.body()
        if shape is None or not body:
            return
        if len(body) <= _SMALL:
            self._json = _shaped(body, shape)
        else:
            self._body = _READ  # FastAPI keeps what it finds here until the request ends
            self._json = await offload.run(PARSE, _shaped, body, shape, owner=owner)


def _shaped(body: bytes, shape: TypeAdapter[Any]) -> Any:
    """A body as the value that a route takes; FastAPI passes it on as it is."""
    try:
        return shape.validate_python(parse(body))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found[:1]]) from None


def parse(body: bytes, max_values: int = MAX_VALUES) -> Any:
    """The value of a JSON body; refuses what parsers disagree on: twice the same key, NaN, numbers out of range."""
    try:
        return read_json(body.decode(), max_values)
    except UnicodeDecodeError:
        raise _unreadable("it is not UTF-8") from None
    except TooManyValues:
        raise Refused(413, f"the body holds more than {max_values} values", code="too_many_values") from None
    except JSONRefused as error:
        raise _unreadable(str(error)) from None


def _unreadable(why: str) -> Refused:
    return Refused(400, f"the body cannot be read as JSON: {why}", code="invalid_json")
