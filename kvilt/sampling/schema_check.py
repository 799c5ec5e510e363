"""From a JSON schema to one that the library enforces exactly, or a refusal that names the keyword.

Everything the library reads otherwise than the specification, ignores, or cannot bound is rewritten or refused here.
Refuses to know tokens and the library itself.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ..errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from .formats import FORMATS
from .pattern import UNWRITABLE, search_in_string
from .schema_dialect import SchemaReader
from .schema_finite import check_finite
from .schema_place import LIST, NAMED, ONE, Path, Schema, kind, named
from .schema_source import SchemaDocument
from .unique_items import UniqueRules

MAX_NODES = 10_000  # schemas after references inside oneOf are written out
MAX_VALUES = 4096  # that const and enum name in all, those inside others included
MAX_MEMBERS = 1000  # properties of one schema
MAX_BRANCHES = 500  # of allOf, anyOf, oneOf and prefixItems
MAX_PATTERNS = 32  # of patternProperties, which are compared pair by pair
MAX_WRITTEN = 4 << 20  # characters of patterns, formats and values, written out
MAX_COUNT = 1_000_000  # of characters, items and properties
MAX_NUMBER = 2**53  # above, a float skips whole numbers
MAX_DECIMALS = 15
MAX_MULTIPLE = 10_000  # the least common multiple of all that stand in a schema: it costs a state each

# How JSON is written. Between tokens stands nothing, a blank, or a line end with an indent: what printers write, and
# no model can write blanks for ever. Strings use the short escapes alone, so that a key has one spelling and none slips
# past the schema of its property.
STYLE: Mapping[str, str] = {"whitespace_pattern": r"(?:\x20|\x0A[\x20\x09]{0,40})", "json_allowed_escapes": 'nrbtf\\"'}

_UNWRITABLE = re.compile(f"[{''.join(f'{chr(low)}-{chr(high)}' for low, high in UNWRITABLE)}]")
_TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
_ANNOTATIONS = frozenset(
    [
        *("$schema", "$id", "$anchor", "$defs", "definitions"),
    ]
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST = {**dict.fromkeys(LIST, MAX_BRANCHES), "properties": MAX_MEMBERS, "patternProperties": MAX_PATTERNS}
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
_ORDERING = ("properties", "patternProperties", "additionalProperties", "required", "items", "prefixItems")


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    """A schema to give to the library, as JSON text, and what it says besides."""

    text: str
    unique: UniqueRules | None  # what has to be watched beside it
    warnings: tuple[str, ...]  # keywords and formats that are not known and have no effect


def checked(text: str) -> str:
    """The schema to give to the library for this one, as JSON text; refused where it says more than a grammar can."""
    return _written(SchemaDocument.read(text), watched=False)


def checked_schema(text: str, *, close_objects: bool = False) -> CheckedSchema:
    """The same for a schema of a whole text, which can be watched.

    With `close_objects`, objects whose schema names properties and says nothing of others have no others.
    """
    reader = SchemaReader(close_objects=close_objects)
    source = SchemaDocument.read(text, reader)
    return CheckedSchema(_written(source, watched=True), UniqueRules.of(source), reader.notes())


def _written(source: SchemaDocument, watched: bool) -> str:
    try:
        result = json.dumps(_Writer(source, watched).document(), ensure_ascii=False)
        result.encode()
    except UnicodeEncodeError:
        raise GrammarError("json_schema", "holds half of a surrogate pair, which is no text") from None
    return result


class _Writer:
    """Rewrites one document; referenced schemas get a name, the others stay in place."""

    def __init__(self, source: SchemaDocument, watched: bool) -> None:
        self.source = source
        self.watched = watched
        self.names: dict[Path, str] = {}
        self.pending: list[Path] = []
        self.inlined: list[Path] = []
        self.patterns: dict[str, str] = {}  # as written, by how they were given
        self.used: dict[Path, None] = {}
        self.nodes = 0
        self.values = 0
        self.written = 0
        self.multiple = 1
        self.bounds: list[tuple[Path, str, int | float]] = []
        self.merges = False  # whether keywords of one schema may come to stand beside those of another
        self.special: dict[str, Callable[[Path, Any], dict[str, Any]]] = {
            "$ref": self._reference,
            "type": _type,
            "const": lambda path, value: {"const": self._value(path, "const", value)},
            "enum": self._enum,
            "pattern": lambda path, value: {"pattern": self._pattern(path, "pattern", value)},
            "format": self._format,
            "multipleOf": self._multiple,
            "required": _required,
            "uniqueItems": self._unique,
        }

    def document(self) -> dict[str, Any]:
        root = self._schema(())
        defs: dict[str, Any] = {}
        while self.pending:
            path = self.pending.pop()
            defs[self.names[path]] = self._schema(path)
        self.source.check_loops([(), *self.names])
        self._check_bounds()
        check_finite(self.source, list(self.used))
        if root is False:
            raise GrammarError(named(()), "the schema is false, so nothing satisfies it")
        # The library takes its options out and moves the last key into their place, so they stand last themselves.
        return {**({} if root is True else root), **({"$defs": defs} if defs else {}), "x-guidance": dict(STYLE)}

    def _check_bounds(self) -> None:
        """Refuse a whole number that is excluded beside a fraction less than 1 away: the library lets it in."""
        beside: dict[tuple[Path | None, str, int], tuple[str, int | float]] = {}
        for path, keyword, value in self.bounds:
            if value != int(value):  # by the whole number that it could be too near to
                upper = keyword.lower().endswith("maximum")
                edge = "exclusiveMinimum" if upper else "exclusiveMaximum"
                near = math.floor(value) if upper else math.ceil(value)
                beside[None if self.merges else path, edge, near] = (keyword, value)
        for path, keyword, value in self.bounds:
            other = beside.get((None if self.merges else path, keyword, int(value))) if value == int(value) else None
            if other is not None:
                raise GrammarUnsupported(
                    named(path), keyword, f"{keyword} {value} beside {other[0]} {other[1]} is not supported; move one"
                )

    def _write(self, characters: int) -> None:
        """Count what the schema becomes; it may be far longer than what its author wrote."""
        self.written += characters
        if self.written > MAX_WRITTEN:
            raise GrammarTooLarge("json_schema", f"needs more than {MAX_WRITTEN} characters written out; simplify it")

    def _schema(self, path: Path) -> Schema:
        self.used[path] = None
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise GrammarTooLarge("json_schema", f"holds more than {MAX_NODES} schemas with its references written out")
        schema = self.source.places[path].schema
        if isinstance(schema, bool):
            return schema
        written: dict[str, Any] = {}
        for keyword, value in schema.items():
            for key, result in self._keyword(path, keyword, value).items():
                written[key] = [*written[key], *result] if key == "allOf" and key in written else result
        self.merges |= "allOf" in written or "patternProperties" in written
        self.merges |= not written.keys().isdisjoint(_IN_PLACE) and len(written) > 1
        return _grouped(written)

    def _keyword(self, path: Path, keyword: str, value: Any) -> dict[str, Any]:
        """What a keyword becomes; a format may become part of an `allOf`."""
        if keyword in _ANNOTATIONS:
            return {}
        if keyword in _MOST and len(value) > (most := _MOST[keyword]):
            raise GrammarTooLarge(named(path), f"{keyword} may hold at most {most} schemas, not {len(value)}")
        if keyword in ONE:
            return {keyword: self._schema((*path, keyword))}
        if keyword == "oneOf":
            return {keyword: [self._option((*path, keyword, str(i))) for i in range(len(value))]}
        if keyword in LIST:
            return {keyword: [self._schema((*path, keyword, str(i))) for i in range(len(value))]}
        if keyword in NAMED:
            return {keyword: self._members(path, keyword, value)}
        if keyword in _COUNTS:
            return self._count(path, keyword, value)
        if keyword in _BOUNDS:
            self.bounds.append((path, keyword, number := _number(path, keyword, value)))
            return {keyword: number}
        if keyword not in self.special:
            raise GrammarUnsupported(
                named(path), keyword, f"the keyword {_shown(keyword)} is not supported; leave it out"
            )
        return self.special[keyword](path, value)

    def _members(self, path: Path, keyword: str, value: dict[str, Any]) -> dict[str, Any]:
        inner = {name: self._schema((*path, keyword, name)) for name in value}
        if keyword != "patternProperties":
            return inner
        written = {self._pattern(path, keyword, name): schema for name, schema in inner.items()}
        if len(written) < len(inner):
            raise GrammarUnsupported(named(path), keyword, "patternProperties holds the same pattern twice; join them")
        return written

    def _beside(self, path: Path) -> dict[str, Any]:
        """The schema in which a keyword stands."""
        schema = self.source.places[path].schema
        assert isinstance(schema, dict)
        return schema

    def _reference(self, path: Path, _value: str) -> dict[str, Any]:
        target = self.source.target(path)
        if target not in self.names:
            self.names[target] = f"s{len(self.names)}"
            self.pending.append(target)
        return {"$ref": f"#/$defs/{self.names[target]}"}

    def _option(self, path: Path) -> Schema:
        """A branch of oneOf, with a bare reference written out: the library compares branches, not references."""
        schema = self.source.places[path].schema
        bare = isinstance(schema, dict) and "$ref" in schema and schema.keys() <= _ANNOTATIONS | {"$ref"}
        if not bare:
            return self._schema(path)
        target = self.source.target(path)
        if target in self.inlined:
            return self._schema(path)
        self.used[path] = None
        self.inlined.append(target)
        try:
            return self._option(target)
        finally:
            self.inlined.pop()

    def _count(self, path: Path, keyword: str, value: Any) -> dict[str, Any]:
        count = _whole(path, keyword, value)
        if keyword != "minProperties" or count <= 1:
            return {keyword: count}
        needed = self._beside(path).get("required")
        if count <= len(set(needed if isinstance(needed, list) else ())):
            return {}  # those that are required are enough
        raise GrammarUnsupported(
            named(path), keyword, "minProperties above 1 is supported only where as many properties are required"
        )

    def _unique(self, path: Path, value: Any) -> dict[str, Any]:
        if not isinstance(value, bool):
            raise GrammarError(named(path), f"uniqueItems must be a boolean, not {kind(value)}")
        most = self._beside(path).get("maxItems")
        if value and not self.watched and not (isinstance(most, int) and most <= 1):
            raise GrammarUnsupported(
                named(path), "uniqueItems", "the keyword uniqueItems is not supported inside a grammar; leave it out"
            )
        return {}

    def _format(self, path: Path, value: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            raise GrammarError(named(path), f"format must be a string, not {kind(value)}")
        form = FORMATS.get(value)
        if form is None:
            known = ", ".join(FORMATS)
            raise GrammarUnsupported(
                named(path), "format", f"the format {_shown(value)} is not supported; the formats are {known}"
            )
        patterns = _format_patterns(value)
        self._write(sum(map(len, patterns)))
        parts: list[dict[str, Any]] = [{"pattern": pattern} for pattern in patterns]
        return {"allOf": [*parts, *([{"maxLength": form.max_length}] if form.max_length else [])]}

    def _pattern(self, path: Path, keyword: str, value: Any) -> str:
        if not isinstance(value, str):
            raise GrammarError(named(path), f"{keyword} must be a string, not {kind(value)}")
        if value not in self.patterns:
            self.patterns[value] = search_in_string(value, f"{named(path)}/{keyword}")
        self._write(len(self.patterns[value]))
        return self.patterns[value]

    def _multiple(self, path: Path, value: Any) -> dict[str, Any]:
        number = _number(path, "multipleOf", value)
        if number <= 0:
            raise GrammarError(named(path), "multipleOf must be above 0")
        parts = Decimal(repr(number)).normalize().as_tuple()
        coefficient, exponent = int("".join(map(str, parts.digits))), int(parts.exponent)
        if exponent < -1 and coefficient > 1:  # the library asks for trailing zeros, and then finds them out of bounds
            raise GrammarUnsupported(
                named(path), "multipleOf", "a multipleOf with two decimals or more must be 0.01, 0.001 and so on"
            )
        self.multiple = math.lcm(self.multiple, coefficient * 10 ** max(exponent, 0))
        if self.multiple > MAX_MULTIPLE:
            raise GrammarTooLarge(
                named(path), f"the values of multipleOf have a common multiple above {MAX_MULTIPLE}; use simpler ones"
            )
        return {"multipleOf": number}

    def _enum(self, path: Path, value: Any) -> dict[str, Any]:
        if not isinstance(value, list) or not value:
            raise GrammarError(named(path), "enum must be a list that is not empty")
        return {"enum": [self._value(path, "enum", each) for each in value]}

    def _value(self, path: Path, keyword: str, value: Any) -> Any:
        """A value that const or enum names, refused where kvilt could not write it."""
        self.values += 1
        if self.values > MAX_VALUES:
            raise GrammarTooLarge(named(path), f"const and enum may name at most {MAX_VALUES} values in all")
        match value:
            case dict():
                return {
                    self._value(path, keyword, key): self._value(path, keyword, each) for key, each in value.items()
                }
            case list():
                return [self._value(path, keyword, each) for each in value]
            case str():
                self._write(len(value))
                if _UNWRITABLE.search(value):
                    what = f"{keyword} names a control character, which kvilt never writes"
                    raise GrammarUnsupported(named(path), "control characters", what)
                return value
            case bool() | None:
                return value
            case _:
                return _number(path, keyword, value)


@functools.cache
def _format_patterns(name: str) -> tuple[str, ...]:
    """The patterns of a known format, written out; a dozen milliseconds for the longest."""
    return tuple(search_in_string(pattern, name) for pattern in FORMATS[name].patterns)


def _grouped(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with its own keywords together, as the library reads keywords on both sides of an anyOf apart.

    What stood before the properties stays before them, since that is the order in which they will be written.
    """
    keys = list(schema)
    first = min((i for i, key in enumerate(keys) if key in _ORDERING), default=len(keys))
    before = [key for key in keys[:first] if key in _IN_PLACE]
    own = [key for key in keys if key not in _IN_PLACE]
    after = [key for key in keys[first:] if key in _IN_PLACE]
    return {key: schema[key] for key in (*before, *own, *after)}


def _type(path: Path, value: Any) -> dict[str, Any]:
    given = value if isinstance(value, list) else [value]
    if not given or not all(isinstance(name, str) and name in _TYPES for name in given):
        raise GrammarError(named(path), f"type must be one or several of {', '.join(_TYPES)}")
    return {"type": value}


def _required(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise GrammarError(named(path), "required must be a list of strings")
    if len(value) > MAX_MEMBERS:
        raise GrammarTooLarge(named(path), f"required may hold at most {MAX_MEMBERS} names, not {len(value)}")
    return {"required": value}


def _whole(path: Path, keyword: str, value: Any) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < 0:
        raise GrammarError(named(path), f"{keyword} must be a whole number from 0 on")
    if value > MAX_COUNT:
        raise GrammarTooLarge(named(path), f"{keyword} may be at most {MAX_COUNT}")
    return int(value)


def _number(path: Path, keyword: str, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GrammarError(named(path), f"{keyword} must be a number, not {kind(value)}")
    if not abs(value) <= MAX_NUMBER or len(_decimals(value)) > MAX_DECIMALS:
        raise GrammarTooLarge(
            named(path), f"the number under {keyword} must be within 2**53 and have at most {MAX_DECIMALS} decimals"
        )
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _decimals(value: int | float) -> str:
    return f"{Decimal(repr(value)):f}".partition(".")[2]


def _shown(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")
