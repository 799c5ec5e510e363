"""Calls written as JSON, read one character at a time: an object or a list of objects with a name and arguments.

Constant work a character and no recursion, whatever a model writes. Refuses to know markers.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from .parse_pieces import Body, Sink, Step

BLANKS = " \t\r\n"
_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
# Keys that stand beside a name in a call; another one in a text without markers means that it is no call.
_BESIDE = (_NAME, *_ARGUMENTS, "type", "id")
_CONTROL = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}
_LITERALS = {"t": "true", "f": "false", "n": "null"}
# Which characters may follow inside a number, by what was read last of it.
_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "zero", "1-9": "int"},
    "zero": {".": ".", "eE": "e"},
    "int": {"0-9": "int", ".": ".", "eE": "e"},
    ".": {"0-9": "frac"},
    "frac": {"0-9": "frac", "eE": "e"},
    "e": {"0-9": "exp", "+-": "sign"},
    "sign": {"0-9": "exp"},
    "exp": {"0-9": "exp"},
}
_LONGEST_NAME = 256  # characters between a marker and arguments before it is clear that no call comes
_WHOLE = ("zero", "int", "frac", "exp")


class At(Enum):
    """What a scanner waits for."""

    VALUE = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    FIRST_ITEM = auto()
    COMMA = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()
    END = auto()


class JsonScanner:
    """Says of each character how it is written in a JSON value that goes on with it.

    Models write line ends into strings as they are; those, and other control characters, come out as escapes.
    """

    def __init__(self) -> None:
        self.at = At.VALUE
        self.in_key = False  # the string that is open, or was last, is a key
        self._open: list[str] = []
        self._left = ""  # of a literal, or what was read last of a number
        self._hex = 0

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def in_string(self) -> bool:
        return self.at in (At.STRING, At.ESCAPE, At.HEX)

    def take(self, char: str) -> str:
        """The text to write for a character; empty if it cannot stand here."""
        written = _CONTROL.get(char, char) if self.at is At.STRING else char
        return written if self._step(char) else ""

    def _step(self, char: str) -> bool:
        match self.at:
            case At.STRING:
                return self._string(char)
            case At.ESCAPE:
                return self._escape(char)
            case At.HEX:
                return self._hex_digit(char)
            case At.LITERAL:
                return self._literal(char)
            case At.NUMBER:
                if self._number(char):
                    return True
                if self._left not in _WHOLE:
                    return False
                self._closed()
        return char in BLANKS or self._token(char)

    def _token(self, char: str) -> bool:
        match self.at, char:
            case ((At.FIRST_KEY | At.KEY), '"'):
                self.at, self.in_key = At.STRING, True
            case At.COLON, ":":
                self.at = At.VALUE
            case At.COMMA, ",":
                self.at = At.KEY if self._open[-1] == "{" else At.VALUE
            case ((At.FIRST_KEY | At.COMMA), "}") if self._open[-1] == "{":
                self._open.pop()
                self._closed()
            case ((At.FIRST_ITEM | At.COMMA), "]") if self._open[-1] == "[":
                self._open.pop()
                self._closed()
            case ((At.VALUE | At.FIRST_ITEM), _):
                return self._value(char)
            case _:
                return False
        return True

    def _value(self, char: str) -> bool:
        match char:
            case '"':
                self.at, self.in_key = At.STRING, False
            case "{" | "[":
                self._open.append(char)
                self.at = At.FIRST_KEY if char == "{" else At.FIRST_ITEM
            case "t" | "f" | "n":
                self.at, self._left = At.LITERAL, _LITERALS[char][1:]
            case "-" | "0":
                self.at, self._left = At.NUMBER, "-" if char == "-" else "zero"
            case _ if "1" <= char <= "9":
                self.at, self._left = At.NUMBER, "int"
            case _:
                return False
        return True

    def _closed(self) -> None:
        """A value is complete."""
        self.at = At.COMMA if self._open else At.END

    def _string(self, char: str) -> bool:
        if char == "\\":
            self.at = At.ESCAPE
        elif char == '"' and self.in_key:
            self.at = At.COLON
        elif char == '"':
            self._closed()
        return True

    def _escape(self, char: str) -> bool:
        if char == "u":
            self.at, self._hex = At.HEX, 4
            return True
        self.at = At.STRING
        return char in '"\\/bfnrt'

    def _hex_digit(self, char: str) -> bool:
        self._hex -= 1
        if self._hex == 0:
            self.at = At.STRING
        return char in "0123456789abcdefABCDEF"

    def _literal(self, char: str) -> bool:
        expected, self._left = self._left[0], self._left[1:]
        if not self._left:
            self._closed()
        return char == expected

    def _number(self, char: str) -> bool:
        for chars, state in _NUMBER[self._left].items():
            if char in chars or (chars in ("0-9", "1-9") and chars[0] <= char <= "9"):
                self._left = state
                return True
        return False


def object_text(text: str) -> str | None:
    """A text that is one JSON object as it is to be written; None if it is none."""
    scanner = JsonScanner()
    written = list(map(scanner.take, text.strip(BLANKS)))
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        return None
    return "".join(written) if written[:1] == ["{"] and all(written) and scanner.at is At.END else None


class _Collects(Enum):
    """What the value that is open at depth 1 is for."""

    NOTHING = auto()
    NAME = auto()
    STREAM = auto()  # arguments of a tool that is known already
    ARGUMENTS = auto()  # arguments that wait for the name
    QUOTED = auto()  # arguments written as a string of JSON


class CallObject:
    """One object with a name and arguments; arguments are passed on as they come once the name is known."""

    def __init__(self, sink: Sink, strict: bool) -> None:
        """`strict` is for texts without markers: only keys of calls, and arguments must be there."""
        self._sink = sink
        self._strict = strict
        self._scanner = JsonScanner()
        self._collects = _Collects.NOTHING
        self._taken: list[str] = []
        self._key = ""
        self._seen: set[str] = set()
        self._name = ""
        self._waiting: str | None = None  # arguments that came before the name
        self._called = False

    def step(self, char: str) -> Step:
        scanner = self._scanner
        key = scanner.depth == 1 and scanner.in_string and scanner.in_key
        value = scanner.depth > 1 or self._in_value()
        expected = scanner.at is At.VALUE and scanner.depth == 1 and char not in BLANKS
        written = scanner.take(char)
        if not written:
            return Step.FAILED
        if key:
            return self._key_char(written)
        if expected:
            return self._value_begins(char)
        if value:
            return self._value_char(written)
        if scanner.at is At.END:
            return self._object_ends()
        return Step.MORE

    def _in_value(self) -> bool:
        scanner = self._scanner
        in_string = scanner.in_string and not scanner.in_key
        return scanner.depth == 1 and (in_string or scanner.at in (At.LITERAL, At.NUMBER))

    def _key_char(self, written: str) -> Step:
        if self._scanner.at is not At.COLON:
            self._taken.append(written)
            return Step.MORE
        self._key = json.loads(f'"{self._take()}"')
        alias = _ARGUMENTS[0] if self._key in _ARGUMENTS else self._key
        if (self._strict and self._key not in _BESIDE) or (alias in self._seen and alias in (_NAME, _ARGUMENTS[0])):
            return Step.FAILED
        self._seen.add(alias)
        return Step.MORE

    def _value_begins(self, char: str) -> Step:
        if self._key == _NAME:
            self._collects = _Collects.NAME
            return Step.MORE if char == '"' else Step.FAILED
        if self._key not in _ARGUMENTS:
            self._collects = _Collects.NOTHING
            return Step.MORE
        if char == "{" and self._name:
            self._collects = _Collects.STREAM
            self._sink.start(self._name)
            self._called = True
            self._sink.arguments(char)
            return Step.MORE
        self._collects = _Collects.QUOTED if char == '"' else _Collects.ARGUMENTS
        self._taken.append(char)
        return Step.MORE if char in '{"n' else Step.FAILED

    def _value_char(self, written: str) -> Step:
        ended = self._scanner.depth == 1 and self._scanner.at is At.COMMA
        match self._collects:
            case _Collects.STREAM:
                self._sink.arguments(written)
                if ended:
                    self._sink.end()
                return Step.MORE
            case _Collects.NAME if ended:
                return self._named(json.loads(f'"{self._take()}"'))
            case _Collects.ARGUMENTS | _Collects.QUOTED if ended:
                self._taken.append(written)
                return self._argued(self._take())
            case _Collects.NOTHING:
                # A number ends at the character behind it, which may end the object, too.
                return self._object_ends() if self._scanner.at is At.END else Step.MORE
        self._taken.append(written)
        return Step.MORE

    def _take(self) -> str:
        text = "".join(self._taken)
        self._taken.clear()
        return text

    def _named(self, name: str) -> Step:
        if self._sink.parameters(name) is None:
            return Step.FAILED
        self._name = name
        if self._waiting is not None:
            self._call(self._waiting)
        return Step.MORE

    def _argued(self, text: str) -> Step:
        given = json.loads(text) if self._collects is _Collects.QUOTED else text
        arguments = object_text("{}" if given in ("null", "") else given)
        if arguments is None:
            return Step.FAILED
        if self._name:
            self._call(arguments)
        else:
            self._waiting = arguments
        return Step.MORE

    def _call(self, arguments: str) -> None:
        self._sink.start(self._name)
        self._sink.arguments(arguments)
        self._sink.end()
        self._called = True

    def _object_ends(self) -> Step:
        if not self._called:
            if not self._name or self._strict:
                return Step.FAILED
            self._call("{}")
        self._sink.settle()
        return Step.DONE


class JsonBody:
    """One call, or a list of them."""

    def __init__(self, sink: Sink, strict: bool) -> None:
        self._sink = sink
        self._strict = strict
        self._call: CallObject | None = None
        self._listed = False
        self._wants_call = True

    def step(self, char: str) -> Step:
        if self._call is not None:
            return self._inside(self._call, char)
        if char in BLANKS:
            return Step.MORE
        if char == "{" and self._wants_call:
            self._call = CallObject(self._sink, self._strict)
            return self._call.step(char)
        if char == "[" and not self._listed:
            self._listed = True
            return Step.MORE
        if self._listed and not self._wants_call and char in ",]":
            self._sink.settle()
            self._wants_call = char == ","
            return Step.MORE if char == "," else Step.DONE
        return Step.FAILED

    def _inside(self, call: CallObject, char: str) -> Step:
        step = call.step(char)
        if step is Step.DONE:
            self._call, self._wants_call = None, False
            return Step.MORE if self._listed else Step.DONE
        return step


class NamedBody:
    """A tool's name, a separator that may be missing, and the arguments; or JSON with names inside."""

    def __init__(self, sink: Sink, separator: str) -> None:
        self._sink = sink
        self._separator = separator
        self._other: Body | None = None
        self._name: list[str] = []
        self._arguments: JsonScanner | None = None

    def step(self, char: str) -> Step:
        if self._other is not None:
            return self._other.step(char)
        if self._arguments is not None:
            return self._inside(self._arguments, char)
        if not self._name and char in BLANKS:
            return Step.MORE
        if not self._name and char in "[{":
            self._other = JsonBody(self._sink, strict=False)
            return self._other.step(char)
        if char == "{":
            return self._begin()
        self._name.append(char)
        return Step.MORE if len(self._name) <= _LONGEST_NAME else Step.FAILED

    def _begin(self) -> Step:
        name, bracket, rest = "".join(self._name).rstrip(BLANKS).partition("[")  # an id may stand between the two
        if self._sink.parameters(name) is None or not (bracket + rest).endswith(self._separator if bracket else ""):
            return Step.FAILED
        self._arguments = JsonScanner()
        self._arguments.take("{")
        self._sink.start(name)
        self._sink.arguments("{")
        return Step.MORE

    def _inside(self, arguments: JsonScanner, char: str) -> Step:
        written = arguments.take(char)
        if not written:
            return Step.FAILED
        self._sink.arguments(written)
        if arguments.at is not At.END:
            return Step.MORE
        self._sink.end()
        return Step.DONE
