"""Bodies of requests: read within limits of size and time, and as JSON of which nobody can be in doubt."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.types import Message, Receive

from .refusal import Refused

MAX_DEPTH = 64
MAX_KEYS = 4096  # of one object: an unknown one is an error of its own
MAX_VALUES = 1 << 18  # checking them takes time in which nobody else is served
_LARGE = 1 << 16  # bytes of a body that is worth a thread
_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_ODD = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")  # a body without these has neither halves of pairs nor NUL
_BAD = re.compile("[\x00\ud800-\udfff]")
_MAX_DIGITS = 20


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
    """A request whose JSON is read by `parse`."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = await asyncio.to_thread(parse, body) if len(body) > _LARGE else parse(body)
        return self._json


def parse(body: bytes, max_values: int = MAX_VALUES) -> Any:
    """The value of a JSON text; refuses what parsers disagree on: twice the same key, NaN, numbers out of range."""
    if body.count(b",") + body.count(b":") > 2 * max_values:
        raise Refused(413, f"the body holds more than {max_values} values", code="too_many_values")
    _check_depth(body)
    try:
        text = body.decode()
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_real, parse_constant=_constant
        )
    except UnicodeDecodeError:
        raise _unreadable("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _unreadable(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    if _ODD.search(body) and any(_BAD.search(text) for text in _strings(value)):
        raise _unreadable("it holds a NUL or half of a surrogate pair, which is no text")
    return value


def _unreadable(why: str) -> Refused:
    return Refused(400, f"the body cannot be read as JSON: {why}", code="invalid_json")


def _too_deep() -> Refused:
    return _unreadable(f"it nests deeper than {MAX_DEPTH}")


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for mark in _MARKS.finditer(body):
        first = body[mark.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep()
        elif first in b"]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _unreadable(f"an object has more than {MAX_KEYS} keys")
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _unreadable(f"the key {twice[:64]!r} stands twice in one object")
    return made


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS or not -(2**63) <= (value := int(digits)) < 2**63:
        raise _unreadable("a whole number is out of range; 64 bits are possible")
    return value


def _real(digits: str) -> float:
    value = float(digits)
    if value - value != 0:
        raise _unreadable("a number is out of range")
    return value


def _constant(name: str) -> NoReturn:
    raise _unreadable(f"{name} is no JSON")


def _strings(value: Any) -> Iterator[str]:
    """Every text in a value, keys included; nesting was checked."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _each(value.values())
    elif isinstance(value, list):
        yield from _each(value)


def _each(values: Any) -> Iterator[str]:
    for value in values:
        yield from _strings(value)
