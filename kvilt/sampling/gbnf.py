"""Grammars in llama.cpp's notation (GBNF) as grammars of the library.

GBNF is about characters, the library about lexemes, of which it takes the longest: `[a-z]+ "x"` would never end. So a
grammar without recursion becomes one pattern, and in others every character is a lexeme of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import GrammarError, GrammarTooLarge, GrammarUnsupported

MAX_DEPTH = 64  # of groups inside each other
MAX_PATTERN = 1 << 16  # characters; a longer one is written as rules
MAX_COUNT = 1000  # of a repetition

_TOKEN = re.compile(
    r"(?P<blank>\s+|\#[^\n]*)"
    r'|(?P<literal>"(?:[^"\\]|\\.)*+")'
    r"|(?P<chars>\[(?:[^\]\\]|\\.)*+\])"
    r"|(?P<name>[A-Za-z0-9_-]+)(?P<is>\s*::=)?"
    r"|(?P<count>\{\s*[0-9]{1,9}\s*(?:,\s*(?:[0-9]{1,9})?\s*)?\})"
    r"|(?P<sign>[|()*+?.])",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class _Text:
    """Characters one after the other."""

    text: str


@dataclass(frozen=True, slots=True)
class _Chars:
    """One character of a class, as a pattern."""

    pattern: str


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str


@dataclass(frozen=True, slots=True)
class _Options:
    """One of several sequences."""

    options: tuple[tuple[_Node, ...], ...]


@dataclass(frozen=True, slots=True)
class _Repeated:
    node: _Node
    count: str  # * + ? {2} {2,} {2,3}


_Node = _Text | _Chars | _Reference | _Options | _Repeated


def gbnf_to_lark(text: str) -> str:
    """The grammar as one of the library; GrammarError says what is wrong with it."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GrammarError("gbnf", "has no rule root")
    for name, rule in rules.items():
        if missing := next((one for one in _references(rule) if one not in rules), None):
            raise GrammarError("gbnf", f"the rule {name[:40]} names {missing[:40]}, which there is not")
    pattern = _Pattern(rules).of_root()
    return f"start: /{pattern}/\n" if pattern is not None else _lark(rules)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match for match in self._scan() if match.lastgroup != "blank"]
        self._at = 0

    def rules(self) -> dict[str, _Options]:
        """The rules by name."""
        found: dict[str, _Options] = {}
        while (token := self._peek()) is not None:
            if token["is"] is None:
                self._refuse("a rule begins with its name and ::=")
            self._at += 1
            if token["name"] in found:
                raise GrammarError("gbnf", f"has two rules {token['name'][:40]}")
            found[token["name"]] = self._options(0)
        return found

    def _scan(self) -> Iterator[re.Match[str]]:
        at = 0
        while at < len(self._text):
            token = _TOKEN.match(self._text, at)
            if token is None:
                line = self._text.count("\n", 0, at) + 1
                raise GrammarError("gbnf", f"line {line}: {self._text[at : at + 20]!r} cannot be read")
            yield token
            at = token.end()

    def _peek(self) -> re.Match[str] | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _sign(self, *signs: str) -> str | None:
        """The next token, if it is one of these signs."""
        token = self._peek()
        if token is None or token[0] not in signs:
            return None
        self._at += 1
        return token[0]

    def _refuse(self, what: str) -> NoReturn:
        token = self._peek()
        line = self._text.count("\n", 0, len(self._text) if token is None else token.start()) + 1
        raise GrammarError("gbnf", f"line {line}: {what}")

    def _options(self, depth: int) -> _Options:
        if depth > MAX_DEPTH:
            raise GrammarTooLarge("gbnf", f"has groups more than {MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._sign("|"):
            options.append(self._sequence(depth))
        return _Options(tuple(options))

    def _sequence(self, depth: int) -> tuple[_Node, ...]:
        nodes: list[_Node] = []
        while (node := self._atom(depth)) is not None:
            while (count := self._count()) is not None:
                node = _Repeated(node, count)
            nodes.append(node)
        return tuple(nodes)

    def _atom(self, depth: int) -> _Node | None:
        token = self._peek()
        if token is None or token["is"] is not None or token[0] in ("|", ")"):
            return None
        if self._sign("("):
            group = self._options(depth + 1)
            if not self._sign(")"):
                self._refuse("a group has no end")
            return group
        self._at += 1
        if token["literal"] is not None:
            return _Text("".join(char for char, _ in _characters(token[0][1:-1])))
        if token["chars"] is not None:
            return _Chars(_class(token[0][1:-1]))
        if token["name"] is not None:
            return _Reference(token["name"])
        if token[0] == ".":
            return _Chars(r"[\x{0}-\x{10FFFF}]")
        self._at -= 1
        return self._refuse(f"{token[0]!r} stands behind nothing that it could repeat")

    def _count(self) -> str | None:
        if sign := self._sign("*", "+", "?"):
            return sign
        token = self._peek()
        if token is None or token["count"] is None:
            return None
        self._at += 1
        bounds = [int(number) for number in re.findall(r"[0-9]+", token[0])]
        if max(bounds) > MAX_COUNT or bounds != sorted(bounds):
            raise GrammarUnsupported("gbnf", "repetition", f"{token[0]} must ascend, and {MAX_COUNT} is the most")
        return re.sub(r"\s", "", token[0])


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """The characters of a literal, and whether each is written as it is."""
    for byte, short, long, escaped, plain in _ESCAPE.findall(text):
        if code := byte or short or long:
            if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
                raise GrammarError("gbnf", f"{code} is no character")
            yield chr(int(code, 16)), False
        else:
            yield plain or _PLAIN.get(escaped, escaped), bool(plain)


def _class(text: str) -> str:
    """A class of characters as a pattern, each character by its number."""
    inverted = text.startswith("^")
    chars = list(_characters(text[inverted:]))
    if not chars:
        raise GrammarError("gbnf", "a class of characters is empty")
    written, at = "", 0
    while at < len(chars):
        low, high = chars[at][0], None
        if at + 2 < len(chars) and chars[at + 1] == ("-", True):
            high = chars[at + 2][0]
            if low > high:
                raise GrammarError("gbnf", f"the range {low}-{high} descends")
        written += _code(low) + ("" if high is None else f"-{_code(high)}")
        at += 1 if high is None else 3
    return f"[{'^' * inverted}{written}]"


def _code(char: str) -> str:
    return f"\\x{{{ord(char):X}}}"


def _references(node: _Node) -> Iterator[str]:
    match node:
        case _Reference(name):
            yield name
        case _Options(options):
            for sequence in options:
                for inner in sequence:
                    yield from _references(inner)
        case _Repeated(inner, _):
            yield from _references(inner)


@dataclass(slots=True)
class _Pattern:
    """Rules written into one pattern, as long as none refers to itself and they do not become too long."""

    rules: Mapping[str, _Options]
    inside: list[str] = field(default_factory=list)
    written: int = 0

    def of_root(self) -> str | None:
        try:
            return self._rule("root")
        except (RecursionError, OverflowError):
            return None

    def _rule(self, name: str) -> str:
        if name in self.inside:
            raise RecursionError(name)
        self.inside.append(name)
        written = self._node(self.rules[name])
        self.inside.pop()
        return written

    def _node(self, node: _Node) -> str:
        match node:
            case _Text(text):
                written = "".join(map(_code, text))
            case _Chars(pattern):
                written = pattern
            case _Reference(name):
                written = self._rule(name)
            case _Options(options):
                written = f"(?:{'|'.join(self._sequence(option) for option in options)})"
            case _Repeated(inner, count):
                written = f"(?:{self._node(inner)}){count}"
        self.written += len(written)
        if self.written > MAX_PATTERN:
            raise OverflowError
        return written

    def _sequence(self, nodes: Sequence[_Node]) -> str:
        return "".join(map(self._node, nodes))


def _lark(rules: Mapping[str, _Options]) -> str:
    """Rules in which every character is a lexeme."""
    names = {name: "start" if name == "root" else f"r{index}" for index, name in enumerate(rules)}
    return "".join(f"{names[name]}: {_lark_options(rule, names)}\n" for name, rule in rules.items())


def _lark_options(node: _Options, names: Mapping[str, str]) -> str:
    return " | ".join(" ".join(_lark_node(inner, names) for inner in option) or '""' for option in node.options)


def _lark_node(node: _Node, names: Mapping[str, str]) -> str:
    match node:
        case _Text(text):
            return " ".join(json.dumps(char) for char in text) or '""'
        case _Chars(pattern):
            return f"/{pattern}/"
        case _Reference(name):
            return names[name]
        case _Options():
            return f"({_lark_options(node, names)})"
        case _Repeated(inner, count):
            return f"({_lark_node(inner, names)}){count}"
