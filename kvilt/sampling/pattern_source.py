"""Regular expressions as their authors write them, in ECMA-262: read into a tree.

What other dialects read otherwise is refused by name. Refuses to know how the tree is enforced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import GrammarError, GrammarTooLarge, GrammarUnsupported

MAX_SIZE = 10_000  # characters of a pattern with every repetition written out
MAX_GROUPS = 64  # one in another

Range = tuple[int, int]
_LAST = 0x10FFFF
_DIGITS: tuple[Range, ...] = ((0x30, 0x39),)
_WORD: tuple[Range, ...] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: tuple[Range, ...] = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS: tuple[Range, ...] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_CATEGORIES = re.compile(
    "L|Letter|LC|Cased_Letter|Lu|Uppercase_Letter|Ll|Lowercase_Letter|Lt|Titlecase_Letter|Lm|Modifier_Letter|"
    "Lo|Other_Letter|M|Mark|Combining_Mark|Mn|Nonspacing_Mark|Mc|Spacing_Mark|Me|Enclosing_Mark|N|Number|"
    "Nd|Decimal_Number|digit|Nl|Letter_Number|No|Other_Number|P|Punctuation|punct|Pc|Connector_Punctuation|"
    "Pd|Dash_Punctuation|Ps|Open_Punctuation|Pe|Close_Punctuation|Pi|Initial_Punctuation|Pf|Final_Punctuation|"
    "Po|Other_Punctuation|S|Symbol|Sm|Math_Symbol|Sc|Currency_Symbol|Sk|Modifier_Symbol|So|Other_Symbol|"
    "Z|Separator|Zs|Space_Separator|Zl|Line_Separator|Zp|Paragraph_Separator|Alphabetic"
)
_PROPERTY = re.compile(r"\{(?:(General_Category|gc|Script|sc)=)?([A-Za-z_]+)\}")
_COUNTS = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_GROUP_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*>")
_HEX = re.compile(r"\{([0-9A-Fa-f]{1,6})\}|([0-9A-Fa-f]{4})")


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of ranges and properties, or one outside all of them; in either case none of the barred."""

    ranges: tuple[Range, ...]
    properties: tuple[str, ...] = ()
    negated: bool = False
    barred: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning of the text (`^`) or its end (`$`)."""

    sign: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A node several times; `most` is None where there is no limit."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes one after another."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of several nodes."""

    options: tuple[Node, ...]


Node = Chars | Anchor | Repeat | Chain | Either


def read_pattern(pattern: str, where: str) -> Node:
    """The tree of a pattern; `where` names it in errors."""
    node = _Reader(pattern, where).read()
    if (size := _size(node)) > MAX_SIZE:
        raise _too_long(where, size)
    return node


def _too_long(where: str, size: int) -> GrammarTooLarge:
    what = f"repetitions make this pattern {size} characters long, and {MAX_SIZE} is the limit; repeat less"
    return GrammarTooLarge(where, what)


def _size(node: Node) -> int:
    match node:
        case Repeat(inner, least, most):
            return _size(inner) * max(least, most or 1, 1)
        case Chain(parts) | Either(parts):
            return sum(map(_size, parts)) or 1
        case _:
            return 1


class _Reader:
    """A recursive descent over one pattern."""

    def __init__(self, pattern: str, where: str) -> None:
        self.text, self.at, self.where, self.depth = pattern, 0, where, 0
        self.atoms = 0

    def read(self) -> Node:
        node = self._either()
        if self.at < len(self.text):
            raise self._broken("a ) without its (")
        return node

    def _broken(self, what: str) -> GrammarError:
        return GrammarError(self.where, f"the pattern has {what} at character {self.at}")

    def _unsupported(self, what: str) -> GrammarUnsupported:
        return GrammarUnsupported(self.where, what, f"{what} in a pattern is not supported (character {self.at})")

    def _take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _either(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._term())
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _term(self) -> Node:
        node = self._atom()
        counts = self._counts()
        if counts is None:
            return node
        if isinstance(node, Anchor):
            raise self._unsupported("a repeated anchor")
        self._take("?")  # lazy or greedy, the same texts match
        if self._counts() is not None:
            raise self._broken("a repetition of a repetition")
        return Repeat(node, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        if self.text.startswith("{,", self.at):  # zero to n for some readers, plain text for others
            raise self._unsupported("{,n}")
        found = _COUNTS.match(self.text, self.at)
        if found is None:
            return None
        least, comma, most = found.groups()
        if max(len(least), len(most or "")) > 9 or (most and int(most) < int(least)):
            raise self._broken("a repetition out of order or out of reach")
        self.at = found.end()
        return int(least), int(most) if most else None if comma else int(least)

    def _atom(self) -> Node:
        char = self.text[self.at]
        if char in "*+?":
            raise self._broken(f"a {char} after nothing")
        if char == "(":
            return self._group()
        self.at += 1
        self.atoms += 1
        if self.atoms > MAX_SIZE:  # the rest need not be read
            raise _too_long(self.where, self.atoms)
        if char in "^$":
            return Anchor(char)
        if char == ".":
            return Chars(_LINE_ENDS, negated=True)
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape(in_class=False)
        return Chars(((ord(char), ord(char)),))

    def _group(self) -> Node:
        for sign, name in (("(?=", "lookahead"), ("(?!", "lookahead"), ("(?<=", "lookbehind"), ("(?<!", "lookbehind")):
            if self.text.startswith(sign, self.at):
                raise self._unsupported(name)
        self.at += 1
        if self._take("?<"):
            name_end = _GROUP_NAME.match(self.text, self.at)
            if name_end is None:
                raise self._broken("a group with a broken name")
            self.at = name_end.end()
        elif self._take("?") and not self._take(":"):
            raise self._unsupported(f"(?{self.text[self.at : self.at + 1]}")
        self.depth += 1
        if self.depth > MAX_GROUPS:
            raise GrammarTooLarge(self.where, f"the pattern has more than {MAX_GROUPS} groups one in another")
        node = self._either()
        self.depth -= 1
        if not self._take(")"):
            raise self._broken("a ( without its )")
        return node

    def _class(self) -> Chars:
        negated = self._take("^")
        if self.text.startswith("]", self.at):
            raise self._unsupported("[^]" if negated else "[]")
        ranges: list[Range] = []
        properties: list[str] = []
        while not self._take("]"):
            first = self._class_item()
            low = single(first)
            if low is not None and self._is_range():
                self.at += 1
                ranges.append(self._range(low))
            else:
                ranges += first.ranges
                properties += first.properties
        return Chars(tuple(ranges), tuple(properties), negated)

    def _is_range(self) -> bool:
        after = self.text[self.at + 1 : self.at + 2]
        if not self.text.startswith("-", self.at) or after in ("", "]"):
            return False
        # `[a-\d]` is no range: its `-` stands for itself, as in `[\d-a]`.
        return after != "\\" or self.text[self.at + 2 : self.at + 3] not in tuple("dDwWsSpP")

    def _range(self, low: int) -> Range:
        high = single(self._class_item())
        if high is None or high < low:
            raise self._broken("a range out of order")
        return low, high

    def _class_item(self) -> Chars:
        if self.at >= len(self.text):
            raise self._broken("a [ without its ]")
        char = self.text[self.at]
        self.at += 1
        return self._escape(in_class=True) if char == "\\" else Chars(((ord(char), ord(char)),))

    def _escape(self, *, in_class: bool) -> Chars:
        char = self.text[self.at : self.at + 1]
        if not char:
            raise self._broken("a \\ before nothing")
        self.at += 1
        for name, ranges in (("d", _DIGITS), ("w", _WORD), ("s", _SPACE)):
            if char == name:
                return Chars(ranges)
            if char == name.upper():
                return Chars(complement(ranges))
        if char in "pP":
            return self._property(char)
        if char in "bB" and not in_class:
            raise self._unsupported(f"\\{char}")
        code = 0x08 if char == "b" else self._code(char)
        return Chars(((code, code),))

    def _code(self, char: str) -> int:
        """The character that an escape stands for."""
        following = self.text[self.at : self.at + 2]
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "0" and not following[:1].isdigit():
            return 0
        if char == "c" and following[:1].isascii() and following[:1].isalpha():
            self.at += 1
            return ord(following[0]) % 32
        if char == "x" and re.fullmatch("[0-9A-Fa-f]{2}", following):
            self.at += 2
            return int(following, 16)
        if char == "u":
            return self._unicode()
        if char.isascii() and not char.isalnum() and char != "_":
            return ord(char)
        raise self._unsupported(f"\\{char}" if char.isprintable() else "this escape")

    def _unicode(self) -> int:
        code = self._hex()
        if 0xD800 <= code < 0xDC00 and self._take("\\u"):  # a pair is one character
            low = self._hex()
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= code < 0xE000:
            raise self._broken("half of a surrogate pair")
        return code

    def _hex(self) -> int:
        found = _HEX.match(self.text, self.at)
        if found is None or int(found[1] or found[2], 16) > _LAST:
            raise self._broken("a \\u that names no character")
        self.at = found.end()
        return int(found[1] or found[2], 16)

    def _property(self, sign: str) -> Chars:
        found = _PROPERTY.match(self.text, self.at)
        if found is None:
            raise self._broken(f"a \\{sign} without a property in braces")
        kind, name = found.groups()
        if kind not in ("Script", "sc") and not _CATEGORIES.fullmatch(name):
            raise self._unsupported(f"\\{sign}{{{name}}}"[:60])
        self.at = found.end()
        return Chars((), (f"\\{sign}{{{'Script=' if kind in ('Script', 'sc') else ''}{name}}}",))


def single(chars: Chars) -> int | None:
    """The one character of a class item; None where it stands for several."""
    if len(chars.ranges) != 1 or chars.properties:
        return None
    low, high = chars.ranges[0]
    return low if low == high else None


def complement(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """All characters outside some ranges."""
    outside: list[Range] = []
    start = 0
    for low, high in sorted(ranges):
        if low > start:
            outside.append((start, low - 1))
        start = max(start, high + 1)
    return (*outside, (start, _LAST)) if start <= _LAST else tuple(outside)
