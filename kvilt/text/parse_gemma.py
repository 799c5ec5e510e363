"""Calls as Gemma 4 writes them: `call:f{a:1,b:<|"|>text<|"|>,c:[true,{d:null}]}`, turned into JSON as they come.

Keys stand without quotes, and a token of its own quotes strings. Refuses to know the markers around calls.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from .parse_marks import partial_marker
from .parse_pieces import BodyStep, CallSink
from .parse_scan import BLANKS, value_text

_HEAD = "call:"
_QUOTES = ('<|"|>', "<escape>", '"')  # of Gemma 4, of FunctionGemma, and of JSON, which both write now and then
_LONGEST_NAME = 256
_MAX_DEPTH = 512


class _Place(Enum):
    """What is read now."""

    HEAD = auto()
    KEY = auto()
    KEY_QUOTED = auto()
    COLON = auto()
    VALUE = auto()
    BARE = auto()  # a number or a word
    QUOTED = auto()
    AFTER = auto()  # a value


class GemmaBody:
    """One call; its arguments are passed on while they are written."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._place = _Place.HEAD
        self._open: list[str] = []
        self._text: list[str] = []  # a head, a key or a bare value
        self._quote = ""  # what ends the string that is open, or has begun to open one
        self._marker = ""  # how much of a quote was read
        self._escaped = False
        self._empty = True  # the innermost object or list has no members yet

    def step(self, char: str) -> BodyStep:
        match self._place:
            case _Place.HEAD:
                return self._head(char)
            case _Place.QUOTED | _Place.KEY_QUOTED:
                return self._quoted(char)
            case _Place.BARE:
                return self._bare(char)
            case _:
                return self._between(char)

    def _head(self, char: str) -> BodyStep:
        if char != "{":
            self._text.append(char)
            return BodyStep.MORE if len(self._text) <= _LONGEST_NAME else BodyStep.FAILED
        head = self._taken().strip(BLANKS)
        name = head.removeprefix(_HEAD).strip(BLANKS)
        if not head.startswith(_HEAD) or self._sink.parameters(name) is None:
            return BodyStep.FAILED
        self._sink.start(name)
        return self._opens(char)

    def _between(self, char: str) -> BodyStep:
        """A key, or a value, or what stands between them."""
        if self._marker or (char in '<"' and self._place in (_Place.KEY, _Place.VALUE) and not self._text):
            return self._opening_quote(char)
        if char in BLANKS and not self._text:
            return BodyStep.MORE
        match self._place:
            case _Place.KEY:
                return self._key(char)
            case _Place.COLON:
                return self._colon() if char == ":" else BodyStep.FAILED
            case _Place.VALUE:
                return self._value(char)
            case _:
                return self._after(char)

    def _opening_quote(self, char: str) -> BodyStep:
        self._marker += char
        if self._marker in _QUOTES:
            self._quote, self._marker = self._marker, ""
            if self._place is _Place.VALUE:
                self._said('"')
            self._place = _Place.QUOTED if self._place is _Place.VALUE else _Place.KEY_QUOTED
            return BodyStep.MORE
        return BodyStep.MORE if any(quote.startswith(self._marker) for quote in _QUOTES) else BodyStep.FAILED

    def _quoted(self, char: str) -> BodyStep:
        if self._quote == '"' and (self._escaped or char == "\\"):
            return self._escape(char)
        text = self._marker + char
        self._marker = partial_marker(text, (self._quote,))
        self._in_string(text[: len(text) - len(self._marker)])
        if self._marker != self._quote:
            return BodyStep.MORE
        self._marker = ""
        if self._place is _Place.QUOTED:
            self._sink.arguments('"')
            self._place = _Place.AFTER
        else:
            self._place = _Place.COLON
        return BodyStep.MORE

    def _escape(self, char: str) -> BodyStep:
        """A backslash in a string of JSON, and what follows it: simple escapes are read, others are text."""
        if not self._escaped:
            self._escaped = True
            return BodyStep.MORE
        self._escaped = False
        self._in_string({"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "/": "/"}.get(char, "\\" + char))
        return BodyStep.MORE

    def _in_string(self, text: str) -> None:
        if not text:
            return
        if self._place is _Place.QUOTED:
            self._sink.arguments(_inner(text))
        else:
            self._text.append(text)

    def _key(self, char: str) -> BodyStep:
        if char == "}" and not "".join(self._text).strip(BLANKS) and self._empty:
            self._text.clear()
            return self._closes(char)
        if char == ":":
            return self._colon()
        self._text.append(char)
        return BodyStep.FAILED if char in "{}[]," or len(self._text) > _LONGEST_NAME else BodyStep.MORE

    def _colon(self) -> BodyStep:
        quoted, key = self._place is _Place.COLON, self._taken()
        if not quoted and not (key := key.strip(BLANKS)):
            return BodyStep.FAILED
        self._said(f'"{_inner(key)}": ')
        self._empty = True  # no comma before the value
        self._place = _Place.VALUE
        return BodyStep.MORE

    def _value(self, char: str) -> BodyStep:
        if char in "{[":
            return self._opens(char)
        if char == "]" and self._open[-1] == "[" and self._empty:
            return self._closes(char)
        if char in "}],:":
            return BodyStep.FAILED
        self._place = _Place.BARE
        return self._bare(char)

    def _bare(self, char: str) -> BodyStep:
        if char not in ",}]":
            self._text.append(char)
            return BodyStep.MORE
        if not self._ends(char):
            return BodyStep.FAILED
        text = self._taken().strip(BLANKS)
        written = value_text(text)
        self._said(f'"{_inner(text)}"' if written is None else written)
        self._place = _Place.AFTER
        return self._after(char)

    def _after(self, char: str) -> BodyStep:
        if char == ",":
            self._empty = False
            self._place = _Place.KEY if self._open[-1] == "{" else _Place.VALUE
            return BodyStep.MORE
        return self._closes(char) if self._ends(char) else BodyStep.FAILED

    def _ends(self, char: str) -> bool:
        """Whether a value may end here: at a comma, or with the object or list that it stands in."""
        return char == "," or (self._open[-1], char) in (("{", "}"), ("[", "]"))

    def _opens(self, char: str) -> BodyStep:
        if len(self._open) >= _MAX_DEPTH:
            return BodyStep.FAILED
        self._said(char)
        self._open.append(char)
        self._empty = True
        self._place = _Place.KEY if char == "{" else _Place.VALUE
        return BodyStep.MORE

    def _closes(self, char: str) -> BodyStep:
        self._open.pop()
        self._sink.arguments(char)
        self._place = _Place.AFTER
        if self._open:
            return BodyStep.MORE
        self._sink.end()
        return BodyStep.DONE

    def _said(self, text: str) -> None:
        """Pass on the beginning of a member, with a comma where others came before it."""
        self._sink.arguments(text if self._empty else f", {text}")

    def _taken(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text


def _inner(text: str) -> str:
    """A text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
