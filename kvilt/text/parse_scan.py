"""JSON one character at a time: whether a text goes on as a value, without recursion and with constant work.

Refuses to know what a value means.
"""

from __future__ import annotations

import json
from enum import Enum, auto

BLANKS = " \t\r\n"
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
_WHOLE = ("zero", "int", "frac", "exp")


class ScanState(Enum):
    """The state of a scanner: what it expects next."""

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
        self.at = ScanState.VALUE
        self.in_key = False  # the string that is open, or was last, is a key
        self._open: list[str] = []
        self._left = ""  # of a literal, or what was read last of a number
        self._hex = 0

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def in_string(self) -> bool:
        return self.at in (ScanState.STRING, ScanState.ESCAPE, ScanState.HEX)

    @property
    def complete(self) -> bool:
        """Whether what was read is a value as it stands."""
        whole_number = self.at is ScanState.NUMBER and self._left in _WHOLE
        return self.at is ScanState.END or (whole_number and not self._open)

    def take(self, char: str) -> str:
        """The text to write for a character; empty if it cannot stand here."""
        written = _CONTROL.get(char, char) if self.at is ScanState.STRING else char
        return written if self._step(char) else ""

    def _step(self, char: str) -> bool:
        match self.at:
            case ScanState.STRING:
                return self._string(char)
            case ScanState.ESCAPE:
                return self._escape(char)
            case ScanState.HEX:
                return self._hex_digit(char)
            case ScanState.LITERAL:
                return self._literal(char)
            case ScanState.NUMBER:
                if self._number(char):
                    return True
                if self._left not in _WHOLE:
                    return False
                self._closed()
        return char in BLANKS or self._token(char)

    def _token(self, char: str) -> bool:
        match self.at, char:
            case ((ScanState.FIRST_KEY | ScanState.KEY), '"'):
                self.at, self.in_key = ScanState.STRING, True
            case ScanState.COLON, ":":
                self.at = ScanState.VALUE
            case ScanState.COMMA, ",":
                self.at = ScanState.KEY if self._open[-1] == "{" else ScanState.VALUE
            case ((ScanState.FIRST_KEY | ScanState.COMMA), "}") if self._open[-1] == "{":
                self._open.pop()
                self._closed()
            case ((ScanState.FIRST_ITEM | ScanState.COMMA), "]") if self._open[-1] == "[":
                self._open.pop()
                self._closed()
            case ((ScanState.VALUE | ScanState.FIRST_ITEM), _):
                return self._value(char)
            case _:
                return False
        return True

    def _value(self, char: str) -> bool:
        match char:
            case '"':
                self.at, self.in_key = ScanState.STRING, False
            case "{" | "[":
                self._open.append(char)
                self.at = ScanState.FIRST_KEY if char == "{" else ScanState.FIRST_ITEM
            case "t" | "f" | "n":
                self.at, self._left = ScanState.LITERAL, _LITERALS[char][1:]
            case "-" | "0":
                self.at, self._left = ScanState.NUMBER, "-" if char == "-" else "zero"
            case _ if "1" <= char <= "9":
                self.at, self._left = ScanState.NUMBER, "int"
            case _:
                return False
        return True

    def _closed(self) -> None:
        """A value is complete."""
        self.at = ScanState.COMMA if self._open else ScanState.END

    def _string(self, char: str) -> bool:
        if char == "\\":
            self.at = ScanState.ESCAPE
        elif char == '"' and self.in_key:
            self.at = ScanState.COLON
        elif char == '"':
            self._closed()
        return True

    def _escape(self, char: str) -> bool:
        if char == "u":
            self.at, self._hex = ScanState.HEX, 4
            return True
        self.at = ScanState.STRING
        return char in '"\\/bfnrt'

    def _hex_digit(self, char: str) -> bool:
        self._hex -= 1
        if self._hex == 0:
            self.at = ScanState.STRING
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


def value_text(text: str) -> str | None:
    """A text that is one JSON value as it is to be written; None if it is none."""
    scanner = JsonScanner()
    written = [scanner.take(char) for char in text.strip(BLANKS)]
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        return None
    return "".join(written) if written and all(written) and scanner.complete else None


def object_text(text: str) -> str | None:
    """The same for texts that are an object."""
    written = value_text(text)
    return written if written is not None and written.startswith("{") else None
