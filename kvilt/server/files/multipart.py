"""A multipart body, read piece by piece: parts begin, bring bytes, and end. No part is kept here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from urllib.parse import unquote

from ..http.errors import HTTPError

MAX_PART_HEADERS = 8192  # bytes
MAX_PARTS = 16
_BOUNDARY = re.compile(r'multipart/form-data\s*;\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))\s*', re.IGNORECASE)
_FIELD = re.compile(r';\s*([A-Za-z]+\*?)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))\s*')
_PLAIN = ("7bit", "8bit", "binary")


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part begins."""

    name: str
    filename: str | None  # as the client wrote it: never a path of this machine


@dataclass(frozen=True, slots=True)
class PartData:
    """Bytes of the part."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnd:
    """The part is whole."""


class _State(Enum):
    START = auto()  # before the first boundary
    HEADERS = auto()
    DATA = auto()
    AFTER = auto()  # behind a boundary: another part, or the end
    DONE = auto()


class MultipartReader:
    """Cuts the pieces of a body into parts. It holds no more than the headers of a part, or a boundary."""

    def __init__(self, content_type: str) -> None:
        found = _BOUNDARY.fullmatch(content_type.strip())
        if found is None:
            raise malformed("the content type has no boundary")
        self._boundary = b"--" + (found[1] or found[2]).encode("ascii", "replace")
        self._state = _State.START
        self._held = b""
        self._parts = 0
        self._empty = True  # no byte of the part was read yet

    def feed(self, data: bytes) -> Iterator[PartBegin | PartData | PartEnd]:
        """What more bytes of the body bring."""
        self._held += data
        while (event := self._next()) is not None:
            yield from event

    def finish(self) -> None:
        """Refuse a body that ended before its last boundary."""
        if self._state is not _State.DONE:
            raise malformed("it ends before its last boundary")

    def _next(self) -> tuple[PartBegin | PartData | PartEnd, ...] | None:
        """The events of one more part of what is held; None: more bytes are needed."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.AFTER:
                return self._after()
            case _State.HEADERS:
                return self._headers()
            case _State.DATA:
                return self._data()
            case _State.DONE:
                self._held = b""  # an epilogue has no meaning
                return None

    def _start(self) -> tuple[()] | None:
        if len(self._held) < len(self._boundary):
            if not self._boundary.startswith(self._held):
                raise malformed("it does not begin with its boundary")
            return None
        if not self._held.startswith(self._boundary):
            raise malformed("it does not begin with its boundary")
        self._drop(len(self._boundary), _State.AFTER)
        return ()

    def _after(self) -> tuple[()] | None:
        if len(self._held) < 2:
            return None
        if self._held.startswith(b"--"):
            self._drop(2, _State.DONE)
        elif self._held.startswith(b"\r\n"):
            self._drop(2, _State.HEADERS)
        else:
            raise malformed("a boundary is followed by neither a line's end nor --")
        return ()

    def _headers(self) -> tuple[PartBegin] | None:
        end = self._held.find(b"\r\n\r\n", 0, MAX_PART_HEADERS)
        if end < 0:
            if len(self._held) >= MAX_PART_HEADERS:
                raise malformed(f"the headers of a part are longer than {MAX_PART_HEADERS} bytes")
            return None
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise malformed(f"it has more than {MAX_PARTS} parts")
        begin = _part(self._held[:end])
        self._drop(end + 2, _State.DATA)  # the line's end before a boundary is a part of it
        self._empty = True
        return (begin,)

    def _data(self) -> tuple[PartData | PartEnd, ...] | None:
        """Up to the boundary; a tail that may be the begin of one is held.

        The first two bytes held are the end of the last header's line.
        """
        mark = b"\r\n" + self._boundary
        skip = 2 if self._empty else 0
        at = self._held.find(mark)
        if at >= 0:
            data = self._held[skip:at]
            self._drop(at + len(mark), _State.AFTER)
            return (PartData(data), PartEnd()) if data else (PartEnd(),)
        whole = len(self._held) - len(mark) + 1
        if whole <= skip:
            return None
        data = self._held[skip:whole]
        self._drop(whole, _State.DATA)
        self._empty = False
        return (PartData(data),)

    def _drop(self, count: int, state: _State) -> None:
        self._held, self._state = self._held[count:], state


def malformed(why: str) -> HTTPError:
    """The error for a body that is no multipart form."""
    return HTTPError(400, f"the body cannot be read as multipart/form-data: {why}", code="invalid_multipart")


def _part(headers: bytes) -> PartBegin:
    try:
        lines = headers.decode().split("\r\n")
    except UnicodeDecodeError:
        raise malformed("the headers of a part are not UTF-8") from None
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if fields.get("content-transfer-encoding", "binary").lower() not in _PLAIN:
        raise malformed("parts with a transfer encoding are not read")
    kind, _, _ = fields.get("content-disposition", "").partition(";")
    if kind.strip().lower() != "form-data":
        raise malformed("a part has no content-disposition of form-data")
    found = {
        name.lower(): re.sub(r"\\(.)", r"\1", quoted) if quoted else plain
        for name, quoted, plain in _FIELD.findall(fields["content-disposition"])
    }
    if not found.get("name"):
        raise malformed("a part has no name")
    return PartBegin(found["name"], _filename(found))


def _filename(found: dict[str, str]) -> str | None:
    """The name of a part's file. Clients write quotes and other scripts in one of three ways."""
    charset, _, encoded = found.get("filename*", "").partition("''")
    if charset.lower() == "utf-8":
        return unquote(encoded, errors="replace")
    name = found.get("filename")
    return None if name is None else name.replace("%22", '"')
