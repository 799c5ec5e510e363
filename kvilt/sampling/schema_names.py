"""The texts that a schema of strings accepts, as a language, and `propertyNames` said with patterns of properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import GrammarError
from .pattern import found_in, pattern_of
from .pattern_algebra import (
    ANY_TEXT,
    NOTHING,
    UNDECIDED,
    Language,
    Letter,
    Undecided,
    concat,
    contains,
    intersection,
    loop,
    other,
    union,
)
from .schema_place import Schema

_ANY_CHARACTER = Letter(((0, 0x10FFFF),))
MAX_NAME = 256  # characters of a text that is written out


def with_names(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same schema of an object without `propertyNames`; None where it cannot be said so.

    Names that are listed and not allowed are forbidden, patterns are cut to the allowed names, and what is additional
    becomes a pattern for all other names that are allowed.
    """
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    listed, patterns = rest.get("properties", {}), rest.get("patternProperties", {})
    try:
        allowed = strings(schema["propertyNames"])
        found = {pattern: found_in(pattern) for pattern in patterns}
        kept = {pattern_of(intersection(found[pattern], allowed)): inner for pattern, inner in patterns.items()}
        others = intersection(allowed, *(other(each) for each in [*found.values(), *map(_text, listed)]))
        more = pattern_of(others)
        named = {name: inner if contains(allowed, name) else False for name, inner in listed.items()}
    except (*UNDECIDED, GrammarError):
        return None
    additional = rest.get("additionalProperties", True)
    if additional is not False and more is not None:
        kept[more] = additional
    rest |= {"properties": named} if named else {}
    rest.pop("patternProperties", None)
    by_pattern = {pattern: inner for pattern, inner in kept.items() if pattern is not None}
    return rest | ({"patternProperties": by_pattern} if by_pattern else {}) | {"additionalProperties": False}


def strings(schema: Schema) -> Language:
    """The strings that a schema accepts; Undecided where a keyword is not about strings alone."""
    if isinstance(schema, bool):
        return ANY_TEXT if schema else NOTHING
    parts = [_rule(keyword, value) for keyword, value in schema.items()]
    return intersection(*parts)


def _rule(keyword: str, value: Any) -> Language:
    match keyword, value:
        case "type", str() | list():
            return ANY_TEXT if value == "string" or "string" in value else NOTHING
        case "const", _:
            return _any([value])
        case "enum", list():
            return _any(value)
        case "pattern", str():
            return found_in(value)
        case "minLength", int():
            return loop(_ANY_CHARACTER, value, None)
        case "maxLength", int():
            return loop(_ANY_CHARACTER, 0, value)
        case "allOf", list():
            return intersection(*map(strings, value))
        case "anyOf", list():
            return union(*map(strings, value))
        case "oneOf", list():
            return _exactly_one([strings(each) for each in value])
        case "not", dict() | bool():
            return other(strings(value))
        case _:
            raise Undecided


def _exactly_one(found: Sequence[Language]) -> Language:
    each = [intersection(one, *(other(two) for two in found if two is not one)) for one in found]
    return union(*each)


def _any(values: Sequence[Any]) -> Language:
    return union(*(_text(value) for value in values if isinstance(value, str)))


def _text(text: str) -> Language:
    if len(text) > MAX_NAME:
        raise Undecided
    return concat(*(Letter(((ord(char), ord(char)),)) for char in text))
