"""Bodies of requests: read within limits of size and time, parsed strictly, and their memory given back."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from ...llm.offload import OWNER, PARSE, Offload
from .errors import ClientDisconnected, HTTPError
from .strict_json import MAX_VALUES, InvalidJSON, TooManyValues, read_json

_SMALL = 1 << 12  # bytes of a body that is parsed on the event loop: a thread would cost more
_READ = b"{}"  # in place of a body that was parsed already


class LimitedBody:
    """An ASGI `receive` that refuses bodies that are too large or too slow."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._until_s = time.monotonic() + timeout_s
        self.whole = False  # all of it was read

    async def __call__(self) -> Message:
        if self.whole:
            return await self._receive()  # only the disconnect can still come
        try:
            async with asyncio.timeout(max(0.0, self._until_s - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise HTTPError(408, "the body did not come in time", code="slow_body", headers=_CLOSE) from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            self.whole = not message.get("more_body", False)
            if self._left < 0:
                raise body_too_large(self._max_bytes)
        return message


_CLOSE = {"connection": "close"}


def body_too_large(limit: int) -> HTTPError:
    """The error for a body over the limit."""
    return HTTPError(413, f"the body is larger than {limit} bytes", code="body_too_large", headers=_CLOSE)


class StrictRequest(Request):
    """A request whose body is read and checked before FastAPI sees it, off the event loop unless it is small."""

    body_bytes = 0  # as received

    async def read(self) -> None:
        """Wait for the whole body."""
        try:
            self.body_bytes = len(await self.body())
        except ClientDisconnect:
            raise ClientDisconnected() from None

    async def check(self, shape: TypeAdapter[Any] | None, offload: Offload, owner: str) -> None:
        """Validate the body as the route's model; afterwards the request holds the validated value only."""
        body = await self.body()
        if shape is None or not body:
            return
        if len(body) <= _SMALL:
            self._json = _validated(body, shape)
        else:
            self._body = _READ  # FastAPI keeps what it finds here until the request ends
            self._json = await offload.run(PARSE, _validated, body, shape, owner=owner)


def _validated(body: bytes, shape: TypeAdapter[Any]) -> Any:
    """A body as the validated value, which FastAPI passes to the route unchanged."""
    return validate(parse_json(body), shape)


def validate(given: Any, shape: TypeAdapter[Any]) -> Any:
    """A value as this shape; the error of another value names the part that is wrong."""
    try:
        return shape.validate_python(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError([_plainest([{**one, "loc": _path(one, given)} for one in found])]) from None


def _path(error: Any, given: Any) -> tuple[str | int, ...]:
    """Where an error is in the body. Pydantic also names members of unions on the way; the body does not have them."""
    path: list[str | int] = ["body"]
    *inner, last = error["loc"] or ("",)
    for part in inner:
        if _has(given, part):
            given = given[part]
            path.append(part)
    if _has(given, last) or error["type"] == "missing":
        path.append(last)
    return tuple(path)


def _has(given: Any, part: Any) -> bool:
    return (isinstance(given, dict) and part in given) or (isinstance(given, list) and isinstance(part, int))


def _plainest(errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first error, or that of another member of the same union which fits better: one that is deeper inside, or
    that is not about the type of the value."""
    at = errors[0]["loc"]
    same = [one for one in errors if one["loc"][: len(at)] == at]
    return max(same, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))


def parse_json(body: bytes, max_values: int = MAX_VALUES) -> Any:
    """The value of a JSON body. Duplicate keys, NaN and numbers out of range are refused: parsers disagree on them."""
    try:
        return read_json(body.decode(), max_values)
    except UnicodeDecodeError:
        raise _unreadable("it is not UTF-8") from None
    except TooManyValues:
        raise HTTPError(413, f"the body holds more than {max_values} values", code="too_many_values") from None
    except InvalidJSON as error:
        raise _unreadable(str(error)) from None


def _unreadable(why: str) -> HTTPError:
    return HTTPError(400, f"the body cannot be read as JSON: {why}", code="invalid_json")


_log = logging.getLogger(__name__)
LARGE_BYTES = 1 << 18  # of a body: what smaller ones leave is used again by the next request
PAUSE_S = 1.0  # between a large request and the trim, so that many requests cost one trim


def system_trim() -> Callable[[], None] | None:
    """glibc's malloc_trim, which returns free memory to the system; None where the C library has no such call."""
    try:
        trim = ctypes.CDLL(None).malloc_trim  # glibc; without the interpreter's lock
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return lambda: trim(0)


class MemoryTrimmer:
    """Returns free memory to the system after large requests, at most once in `pause_s`."""

    def __init__(self, offload: Offload, trim: Callable[[], None] | None = None, pause_s: float = PAUSE_S) -> None:
        self._offload = offload
        self._trim = trim or system_trim()
        self._pause_s = pause_s
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def ended(self, body_bytes: int) -> None:
        """Note that a request with a body of this size has ended."""
        if self._trim is None or body_bytes < LARGE_BYTES:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._later(self._trim))
        else:
            self._again = True

    async def _later(self, trim: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            self._again = False
            try:
                await self._offload.run(OWNER, trim)
            except Exception:
                _log.exception("free memory was not returned to the system")
            if not self._again:
                return
