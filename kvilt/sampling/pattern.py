"""Regular expressions as JSON Schema means them (ECMA-262), rewritten for the library that enforces them.

What the two dialects read differently is written out (`.`, `\\s`, classes), so that a pattern never means something
else than it says. Refuses to know schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import GrammarError, GrammarUnsupported
from .pattern_algebra import (
    ANY_TEXT,
    EMPTY,
    UNDECIDED,
    Language,
    Undecided,
    as_node,
    concat,
    intersection,
    language,
    other,
    union,
)
from .pattern_source import Anchor, Chain, Chars, Either, Look, Node, Range, Repeat, complement, read_pattern, single

# Control characters that JSON has no short escape for: kvilt writes none inside strings.
UNWRITABLE: tuple[Range, ...] = ((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F))


def whole_match(pattern: str, where: str = "regex") -> str:
    """The pattern for the whole of a text, in the library's dialect."""
    return _join(_edges(read_pattern(pattern, where), _Frame(where, (), whole=True)), "", where)


def search_in_string(pattern: str, where: str) -> str:
    """The pattern for somewhere in a JSON string, in the library's dialect and anchored at both ends."""
    node = _writable(read_pattern(pattern, where), where)
    return f"^(?:{_join(_edges(node, _Frame(where, UNWRITABLE)), '(?s:.*)', where)})$"


def other_texts(pattern: str) -> str | None:
    """A pattern for the strings in which this one is not found; None where that is not decided here."""
    try:
        return pattern_of(other(found_in(pattern)))
    except (*UNDECIDED, GrammarError):
        return None


def found_in(pattern: str) -> Language:
    """The strings in which a pattern is found; Undecided where that takes too much."""
    where = "pattern"
    node = _writable(read_pattern(pattern, where), where)
    return union(*(_language(*edge) for edge in _edges(node, _Frame(where, UNWRITABLE))))


def pattern_of(wanted: Language) -> str | None:
    """A pattern, as schemas have them, for exactly these strings; None where there is none of them."""
    node = as_node(wanted, UNWRITABLE)
    return None if node is None else f"^(?:{_write(node, 'pattern')})$"


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
        case Look(inner):
            return replace(node, node=_writable(inner, where))
        case Anchor():
            return node


def _without(ranges: Sequence[Range], barred: Sequence[Range]) -> tuple[Range, ...]:
    """Some ranges less others."""
    return complement((*complement(ranges), *barred))


@dataclass(frozen=True, slots=True)
class _Frame:
    """What stands around a pattern."""

    where: str  # for errors
    barred: tuple[Range, ...]  # characters that are never written
    whole: bool = False  # the pattern is for a whole text, as if it were anchored


Edge = tuple[bool, Node, bool]  # anchored at the beginning, what stands between, anchored at the end


def _edges(node: Node, frame: _Frame) -> list[Edge]:
    """The alternatives of a pattern; one with lookaround becomes one without."""
    match node:
        case Either(options):
            return [edge for option in options for edge in _edges(option, frame)]
        case Chain(parts):
            inner = list(parts)
        case _:
            inner = [node]
    starts = bool(inner) and inner[0] == Anchor("^")
    inner = inner[starts:]
    ends = bool(inner) and inner[-1] == Anchor("$")
    inner = inner[: len(inner) - ends]
    if len(inner) == 1 and isinstance(inner[0], Either | Chain):  # a group alone: anchors inside it are at edges
        found = _edges(inner[0], frame)
        return [(starts or first, body, ends or last) for first, body, last in found]
    if any(isinstance(part, Look) for part in inner):
        return [_looked(starts, inner, ends, frame)]
    return [(starts, Chain(tuple(inner)), ends)]


def _looked(starts: bool, parts: list[Node], ends: bool, frame: _Frame) -> Edge:
    """An alternative with lookaround among its parts, as one for the whole text."""
    look = next(part for part in parts if isinstance(part, Look))
    try:
        found = as_node(_around(starts or frame.whole, parts, ends or frame.whole), frame.barred)
    except UNDECIDED:
        raise GrammarUnsupported(frame.where, look.name, f"this {look.name} in a pattern is not supported") from None
    if found is None:
        raise GrammarError(frame.where, "no text matches the pattern")
    return True, found, True


def _around(starts: bool, parts: Sequence[Node], ends: bool) -> Language:
    """The texts in which these parts are found. What is behind concerns all before it, what is ahead all after it."""
    if starts and parts and isinstance(look := parts[0], Look) and not look.behind:
        return intersection(_ahead([look], ends=False), _around(starts, parts[1:], ends))  # about the whole text
    behind = [i for i, part in enumerate(parts) if isinstance(part, Look) and part.behind]
    if not behind:
        before = EMPTY if starts else ANY_TEXT
        return concat(before, _ahead(parts, ends))
    at = behind[-1]
    look = parts[at]
    if not isinstance(look, Look) or any(isinstance(part, Look) and not part.behind for part in parts[:at]):
        raise Undecided  # what is ahead would have to look past this
    held = concat(ANY_TEXT, language(look.node))
    left = intersection(_around(starts, parts[:at], ends=True), other(held) if look.negated else held)
    return concat(left, _ahead(parts[at + 1 :], ends))


def _ahead(parts: Sequence[Node], ends: bool) -> Language:
    result: Language = EMPTY if ends else ANY_TEXT
    for part in reversed(parts):
        if isinstance(part, Look):
            held = union(*(_language(True, body, last) for body, last in _ends(part.node)))
            result = intersection(result, other(held) if part.negated else held)
        else:
            result = concat(language(part), result)
    return result


def _ends(node: Node) -> list[tuple[Node, bool]]:
    """The alternatives of what is ahead, and whether the text ends behind them."""
    options = node.options if isinstance(node, Either) else (node,)
    chains = [list(option.parts) if isinstance(option, Chain) else [option] for option in options]
    last = [bool(chain) and chain[-1] == Anchor("$") for chain in chains]
    return [(Chain(tuple(chain[: len(chain) - end])), end) for chain, end in zip(chains, last, strict=True)]


def _language(starts: bool, body: Node, ends: bool) -> Language:
    return concat(EMPTY if starts else ANY_TEXT, language(body), EMPTY if ends else ANY_TEXT)


def _join(edges: Sequence[Edge], around: str, where: str) -> str:
    return "|".join(
        ("" if starts else around) + _write(body, where) + ("" if ends else around) for starts, body, ends in edges
    )


def _write(node: Node, where: str) -> str:
    match node:
        case Chars():
            return _write_chars(node)
        case Anchor(sign):
            raise GrammarUnsupported(where, sign, f"an anchor ({sign}) in the middle of a pattern is not supported")
        case Look():
            raise GrammarUnsupported(where, node.name, f"{node.name} inside a group of a pattern is not supported")
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
