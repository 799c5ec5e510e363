"""Calls written as Python: `f(a=1, b=["x"])`, in a list or one a line. Literals alone, never anything evaluated.

Each argument is read when it is complete, in one pass with a bound on nesting. Refuses to know markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from .parse_pieces import BodyStep, CallSink
from .parse_scan import BLANKS

_OPENERS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 64
_LONGEST_NAME = 256
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
# Every alternative begins with another character, and none can match one text in two ways.
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[^\"'\\\n]+")
_BLANK = re.compile(r"[ \t\r\n]*")


class _Bad(Exception):
    """The text is no literal that kvilt reads."""


class PythonBody:
    """Calls in brackets, or (not `listed`) one after the other until a character that begins none."""

    def __init__(self, sink: CallSink, listed: bool) -> None:
        self._sink = sink
        self._listed = listed
        self._opened = not listed
        self._called = False
        self._wants_call = True
        self._name: list[str] = []
        self._spaced = False  # a blank stood after the name
        self._call: _Brackets | None = None
        self._print = ""  # "open" or "filled" while a call stands inside print(...), as Gemma writes it

    def step(self, char: str) -> BodyStep:
        if self._call is not None:
            return self._arguments(self._call, char)
        if not self._opened:
            self._opened = char == "["
            return BodyStep.MORE if self._opened or char in BLANKS else BodyStep.FAILED
        if char in BLANKS:
            self._spaced = bool(self._name)
            return BodyStep.MORE
        if self._name or (self._wants_call and (char.isalpha() or char == "_")):
            return self._named(char)
        return self._between(char)

    def _between(self, char: str) -> BodyStep:
        if self._print == "filled" and char == ")":
            self._print = ""
        elif self._listed and not self._wants_call and char in ",]":
            self._wants_call = char == ","
        elif self._listed or self._print or not self._called:
            return BodyStep.FAILED
        elif char not in ",;":
            return BodyStep.BEFORE
        self._sink.settle()
        return BodyStep.DONE if char == "]" else BodyStep.MORE

    def _named(self, char: str) -> BodyStep:
        if char != "(":
            self._name.append(char)
            fits = len(self._name) <= _LONGEST_NAME and not self._spaced and char not in "()[]{}'\"`,;="
            return BodyStep.MORE if fits else BodyStep.FAILED
        name = "".join(self._name)
        self._name.clear()
        self._spaced = False
        parameters = self._sink.parameters(name)
        if parameters is None:
            printing = name == "print" and not self._listed and not self._print
            self._print = "open" if printing else self._print
            return BodyStep.MORE if printing else BodyStep.FAILED
        if self._print == "filled":
            return BodyStep.FAILED
        self._call = _Brackets(name, parameters)
        return BodyStep.MORE

    def _arguments(self, call: _Brackets, char: str) -> BodyStep:
        ends = call.takes(char)
        if not ends:
            return BodyStep.MORE
        try:
            fragment = call.argument(last=ends == ")")
        except _Bad:
            return BodyStep.FAILED
        if not call.begun:
            self._sink.start(call.name)
        self._sink.arguments(("" if call.begun else "{") + fragment)
        call.begun = True
        if ends == ",":
            return BodyStep.MORE
        self._sink.arguments("}")
        self._sink.end()
        self._called, self._call, self._wants_call = True, None, not self._listed
        self._print = "filled" if self._print else ""
        return BodyStep.MORE


class _Brackets:
    """The text between a call's brackets, one argument at a time."""

    def __init__(self, name: str, parameters: Iterable[str]) -> None:
        self.name = name
        self.begun = False  # an argument was passed on
        self._nameless = iter(parameters)  # the names of arguments that stand without one
        self._seen: set[str] = set()
        self._text: list[str] = []
        self._open = 0
        self._quote = ""
        self._escaped = False

    def takes(self, char: str) -> str:
        """Take a character; the comma or bracket that ends an argument is returned instead."""
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._open += 1
        elif char in ")]}":
            if char == ")" and self._open == 0:
                return char
            self._open -= 1
        elif char == "," and self._open == 0:
            return char
        self._text.append(char)
        return ""

    def argument(self, last: bool) -> str:
        """The argument that has ended, as a member of a JSON object; empty where the `last` one is."""
        cursor = _Cursor("".join(self._text))
        self._text.clear()
        if cursor.ended() and last:
            return ""
        keyword = cursor.keyword()
        if keyword is None:
            keyword = next(self._nameless, "")
        else:
            self._nameless = iter(())  # Python wants what has no keyword first
        if not keyword or keyword in self._seen:
            raise _Bad
        value = cursor.value(0)
        if not cursor.ended():
            raise _Bad
        before = ", " if self._seen else ""
        self._seen.add(keyword)
        return f"{before}{json.dumps(keyword, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


class _Cursor:
    """A place in a text of literals."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._blank()

    def ended(self) -> bool:
        return self._at == len(self._text)

    def keyword(self) -> str | None:
        """`name=` if it stands here."""
        word = _WORD.match(self._text, self._at)
        if word is None:
            return None
        blank = _BLANK.match(self._text, word.end())
        assert blank is not None
        if self._text[blank.end() : blank.end() + 1] != "=":
            return None
        self._at = blank.end() + 1
        self._blank()
        return word[0]

    def value(self, depth: int) -> Any:
        char = self._peek()
        if depth > _MAX_DEPTH:
            raise _Bad
        if char in "\"'":
            return self._strings()
        if char in "[(":
            return self._items(_OPENERS[char], depth)
        if char == "{":
            return self._members(depth)
        if word := _WORD.match(self._text, self._at):
            if word[0] not in _WORDS:
                raise _Bad
            self._move(word.end())
            return _WORDS[word[0]]
        return self._number()

    def _number(self) -> int | float:
        found = _NUMBER.match(self._text, self._at)
        if found is None:
            raise _Bad
        self._move(found.end())
        value = float(found[0]) if set(found[0]) & set(".eE") else int(found[0])
        if value in (float("inf"), float("-inf")):
            raise _Bad
        return value

    def _items(self, closer: str, depth: int) -> list[Any]:
        self._move(self._at + 1)
        found = []
        while self._peek() != closer:
            found.append(self.value(depth + 1))
            if self._peek() != closer:
                self._expect(",")
        self._expect(closer)
        return found

    def _members(self, depth: int) -> dict[str, Any]:
        self._move(self._at + 1)
        found = {}
        while self._peek() != "}":
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise _Bad
            self._expect(":")
            found[key] = self.value(depth + 1)
            if self._peek() != "}":
                self._expect(",")
        self._expect("}")
        return found

    def _strings(self) -> str:
        """A string, and those that stand right after it: Python joins them."""
        parts: list[str] = []
        while self._at < len(self._text) and self._text[self._at] in "\"'":
            self._string(parts)
            self._blank()
        text = "".join(parts)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise _Bad
        return text

    def _string(self, parts: list[str]) -> None:
        quote = self._text[self._at]
        self._at += 1
        while (char := self._text[self._at : self._at + 1]) != quote:
            if char == "\\":
                parts.append(self._escape())
            elif plain := _PLAIN.match(self._text, self._at):
                parts.append(plain[0])
                self._at = plain.end()
            elif char:
                parts.append(char)  # a line end, or the other quote
                self._at += 1
            else:
                raise _Bad
        self._at += 1

    def _escape(self) -> str:
        kind = self._text[self._at + 1 : self._at + 2]
        digits = _HEX.get(kind, 0)
        start, self._at = self._at + 2, self._at + 2 + digits
        if digits == 0:
            return _ESCAPES.get(kind, "\\" + kind)
        try:
            return chr(int(self._text[start : self._at].rjust(digits, "x"), 16))
        except (ValueError, OverflowError):
            raise _Bad from None

    def _peek(self) -> str:
        if self.ended():
            raise _Bad
        return self._text[self._at]

    def _expect(self, char: str) -> None:
        if self._peek() != char:
            raise _Bad
        self._move(self._at + 1)

    def _move(self, at: int) -> None:
        self._at = at
        self._blank()

    def _blank(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        assert blank is not None
        self._at = blank.end()
