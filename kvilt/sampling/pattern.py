"""Regular expressions as JSON Schema means them (ECMA-262), rewritten for the library that enforces them.

What the two dialects read differently is written out (`.`, `\\s`, classes), so that a pattern never means something
else than it says. Refuses to know schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import GrammarUnsupported
from .pattern_source import Anchor, Chain, Chars, Either, Node, Range, Repeat, complement, read_pattern, single

# Control characters that JSON has no short escape for: kvilt writes none inside strings.
UNWRITABLE: tuple[Range, ...] = ((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F))


def whole_match(pattern: str, where: str = "regex") -> str:
    """The pattern for the whole of a text, in the library's dialect."""
    return _join(_edges(read_pattern(pattern, where), where), "")


def search_in_string(pattern: str, where: str) -> str:
    """The pattern for somewhere in a JSON string, in the library's dialect and anchored at both ends."""
    node = _writable(read_pattern(pattern, where), where)
    return f"^(?:{_join(_edges(node, where), '(?s:.*)')})$"


def literal(text: str) -> str:
    """A pattern that matches this text alone."""
    return "".join(map(_char, map(ord, text)))


def _writable(node: Node, where: str) -> Node:
    """The pattern without the characters that kvilt writes in no string; refused where it insists on one.

    The library takes a quote or a backslash for a class that holds all control characters, so they must go anyway.
    """
    match node:
        case Chars(_, (), _):
            left = _without(complement(node.ranges) if node.negated else node.ranges, UNWRITABLE)
            if not left:
                what = "the pattern asks for a control character, which kvilt never writes"
                raise GrammarUnsupported(where, "control characters", what)
            return Chars(left)
        case Chars():
            return replace(node, barred=UNWRITABLE)
        case Repeat(inner):
            return replace(node, node=_writable(inner, where))
        case Chain(parts):
            return Chain(tuple(_writable(part, where) for part in parts))
        case Either(options):
            return Either(tuple(_writable(option, where) for option in options))
        case Anchor():
            return node


def _without(ranges: Sequence[Range], barred: Sequence[Range]) -> tuple[Range, ...]:
    """Some ranges less others."""
    return complement((*complement(ranges), *barred))


def _edges(node: Node, where: str) -> list[tuple[bool, str, bool]]:
    """The alternatives of a pattern: anchored at the beginning, what stands between, anchored at the end."""
    match node:
        case Either(options):
            return [edge for option in options for edge in _edges(option, where)]
        case Chain(parts):
            inner = list(parts)
        case _:
            inner = [node]
    starts = bool(inner) and inner[0] == Anchor("^")
    inner = inner[starts:]
    ends = bool(inner) and inner[-1] == Anchor("$")
    inner = inner[: len(inner) - ends]
    if len(inner) == 1 and isinstance(inner[0], Either | Chain):  # a group alone: anchors inside it are at edges
        return [(starts or first, body, ends or last) for first, body, last in _edges(inner[0], where)]
    return [(starts, _write(Chain(tuple(inner)), where), ends)]


def _join(edges: Sequence[tuple[bool, str, bool]], around: str) -> str:
    return "|".join(("" if starts else around) + body + ("" if ends else around) for starts, body, ends in edges)


def _write(node: Node, where: str) -> str:
    match node:
        case Chars():
            return _write_chars(node)
        case Anchor(sign):
            raise GrammarUnsupported(where, sign, f"an anchor ({sign}) in the middle of a pattern is not supported")
        case Repeat(inner, least, most):
            return f"(?:{_write(inner, where)}){{{least},{'' if most is None else most}}}"
        case Chain(parts):
            return "".join(f"(?:{_write(p, where)})" if isinstance(p, Either) else _write(p, where) for p in parts)
        case Either(options):
            return "|".join(_write(option, where) for option in options)


def _write_chars(chars: Chars) -> str:
    one = single(chars)
    if one is not None and not chars.negated and not chars.barred:
        return _char(one)
    written = f"[{'^' if chars.negated else ''}{_write_ranges(chars.ranges)}{''.join(chars.properties)}]"
    return f"[{written}--[{_write_ranges(chars.barred)}]]" if chars.barred else written


def _write_ranges(ranges: Sequence[Range]) -> str:
    return "".join(f"{_char(low)}-{_char(high)}" if low < high else _char(low) for low, high in ranges)


def _char(code: int) -> str:
    char = chr(code)
    plain = char.isascii() and (char.isalnum() or char in "_:,;=@!%")
    return char if plain else f"\\u{{{code:X}}}"
