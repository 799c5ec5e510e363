"""A JSON parser with linear time and bounded memory that refuses everything on which parsers disagree.

Each step consumes characters, and nesting and values are counted while they are read. No call into C reads more than
one piece of the text, so the parser never holds the interpreter's lock for long and can be stopped between any two
tokens. It knows no HTTP.
"""

from __future__ import annotations

import re
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from typing import Any

MAX_DEPTH = 64
MAX_KEYS = 4096  # of one object: each unknown key would be an error of its own
MAX_VALUES = 1 << 18
_MAX_DIGITS = 20
_MAX_REAL_CHARS = 1100  # the longest exact decimal form of a double is shorter
_FIRST_PIECE, _LAST_PIECE = 1 << 9, 1 << 16  # characters of a long string that are read at once
_ESCAPE_CHARS = 6  # of the longest escape
# Repeats are possessive: the matcher never goes back, so no position is visited twice.
_TOKEN = re.compile(
    r"[ \t\n\r]*+(?:"
    r'"(?P<text>[^"\\\x00-\x1f]{0,256}+)"'
    r"|(?P<number>-?(?:0|[1-9][0-9]*+)(?P<real>(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?))"
    r'|(?P<mark>[\[\]{},:"]|[A-Za-z]{1,9}+)|(?P<end>\Z))'
)
# Token ids come in lists of thousands, so many numbers are matched at once.
_WHOLE_NUMBERS = re.compile(r"(?:[ \t\n\r]*+(?:0|[1-9][0-9]{0,17}+)[ \t\n\r]*+,){1,4096}+")
_WORDS = {"true": True, "false": False, "null": None}
_SURROGATE = re.compile("[\ud800-\udfff]")


class InvalidJSON(ValueError):
    """The text is no JSON, or JSON that two parsers would read differently."""


class TooManyValues(InvalidJSON):
    """The text has more values than are allowed."""


def read_json(text: str, max_values: int = MAX_VALUES) -> Any:
    """The value of a JSON text."""
    return _Reader(text, max_values).read()


class _Reader:
    """Parses one text."""

    def __init__(self, text: str, max_values: int) -> None:
        self._text = text
        self._at = 0
        self._left = self._max_values = max_values

    def read(self) -> Any:
        value = self._value(self._next(), 0)
        if self._next().lastgroup != "end":
            raise self._wrong("there is more text after the value")
        return value

    def _next(self) -> re.Match[str]:
        token = _TOKEN.match(self._text, self._at)
        if token is None:
            raise self._wrong("no JSON can be read")
        self._at = token.end()
        return token

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise TooManyValues(f"it holds more than {self._max_values} values")

    def _value(self, token: re.Match[str], depth: int) -> Any:
        self._count(1)
        match token.lastgroup:
            case "text":
                return token["text"]
            case "number":
                return _number(token["number"], bool(token["real"]))
            case "mark":
                return self._marked(token["mark"], depth)
        raise self._wrong("a value is missing")

    def _marked(self, mark: str, depth: int) -> Any:
        if mark == '"':
            return self._long_text()
        if mark in _WORDS:
            return _WORDS[mark]
        if mark not in ("[", "{"):
            raise self._wrong(f"{mark} is no value")
        if depth == MAX_DEPTH:
            raise InvalidJSON(f"it nests deeper than {MAX_DEPTH}")
        return self._array(depth + 1) if mark == "[" else self._object(depth + 1)

    def _array(self, depth: int) -> list[Any]:
        items: list[Any] = self._whole_numbers()
        token = self._next()
        if token["mark"] == "]" and not items:
            return items
        while True:
            items.append(self._value(token, depth))
            mark = self._next()["mark"]
            if mark == "]":
                return items
            if mark != ",":
                raise self._wrong("a comma is missing")
            token = self._next()

    def _whole_numbers(self) -> list[int]:
        """The whole numbers that a list begins with, each followed by a comma."""
        numbers: list[int] = []
        while (run := _WHOLE_NUMBERS.match(self._text, self._at)) is not None:
            found = run[0].split(",")[:-1]
            self._count(len(found))
            numbers += map(int, found)
            self._at = run.end()
        return numbers

    def _object(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        token = self._next()
        if token["mark"] == "}":
            return made
        while True:
            key = self._key(token, made)
            made[key] = self._value(self._next(), depth)
            mark = self._next()["mark"]
            if mark == "}":
                return made
            if mark != ",":
                raise self._wrong("a comma is missing")
            token = self._next()

    def _key(self, token: re.Match[str], made: dict[str, Any]) -> str:
        """A key that is new to the object, and the colon after it."""
        key = token["text"]
        if key is None:
            if token["mark"] != '"':
                raise self._wrong("a name in double quotes is missing")
            key = self._long_text()
        if key in made:
            raise InvalidJSON(f"the key {key[:64]!r} occurs twice in one object")
        if len(made) == MAX_KEYS:
            raise InvalidJSON(f"an object has more than {MAX_KEYS} keys")
        if self._next()["mark"] != ":":
            raise self._wrong("a colon is missing")
        return str(key)

    def _long_text(self) -> str:
        """The rest of a long string, or of one with escapes, in pieces of growing size."""
        pieces: list[str] = []
        size = _FIRST_PIECE
        while True:
            piece = self._text[self._at : self._at + size]
            whole = self._at + size >= len(self._text)
            if not whole:
                piece = piece[: _before_escape(piece)] + '"'
            try:
                text, end = scanstring(piece, 0, True)
            except JSONDecodeError as error:
                self._at += error.pos
                raise self._wrong(error.msg) from None
            pieces.append(text)
            if whole or end < len(piece):  # the closing quote was inside this piece
                self._at += end
                return _checked("".join(pieces))
            self._at += end - 1
            size = min(2 * size, _LAST_PIECE)

    def _wrong(self, why: str) -> InvalidJSON:
        return InvalidJSON(f"{why} at character {self._at}")


def _before_escape(piece: str) -> int:
    """Where to cut a piece so that no escape sequence is cut in two."""
    last = piece.rfind("\\", len(piece) - _ESCAPE_CHARS)
    if last < 0:
        return len(piece)
    run = last + 1 - len(piece[: last + 1].rstrip("\\"))
    return last if run % 2 else len(piece)


def _checked(text: str) -> str:
    """Refuse NUL and half surrogate pairs; halves from two sides of a cut are joined."""
    if "\0" in text:
        raise InvalidJSON("it holds a NUL, which is no text")
    if not text.isascii() and _SURROGATE.search(text):
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise InvalidJSON("it holds half of a surrogate pair, which is no text") from None
    return text


def _number(digits: str, real: bool) -> int | float:
    if real:
        value = float(digits) if len(digits) <= _MAX_REAL_CHARS else float("inf")
        if value - value != 0:
            raise InvalidJSON("a number is out of range")
        return value
    if len(digits) > _MAX_DIGITS or not -(2**63) <= (whole := int(digits)) < 2**63:
        raise InvalidJSON("a whole number is out of range; 64 bits are possible")
    return whole
