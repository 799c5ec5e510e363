"""A JSON schema as its author wrote it: read, its subschemas found by place, its references resolved.

Refuses to fetch anything, and to know what keywords mean beyond where they hold schemas.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ..errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from .schema_dialect import SchemaReader
from .schema_place import IN_PLACE, LIST, NAMED, ONE, Path, Schema, kind, named

MAX_DEPTH = 64
MAX_URI = 2048  # of names and references, joined with those around them


@dataclass(frozen=True, slots=True)
class Subschema:
    """One subschema and the URI that references in it are relative to."""

    schema: Schema
    base: str


@dataclass(slots=True)
class SchemaDocument:
    """All subschemas of a document by their path, and the names that references may use for them."""

    places: dict[Path, Subschema] = field(default_factory=dict)
    resources: dict[str, Path] = field(default_factory=dict)
    anchors: dict[tuple[str, str], Path] = field(default_factory=dict)
    targets: dict[Path, Path] = field(default_factory=dict)  # found so far

    @classmethod
    def read(cls, text: str, reader: SchemaReader | None = None) -> SchemaDocument:
        """The subschemas of a schema given as JSON text."""
        source = cls()
        source.resources[""] = ()
        schema = parse_json(text)
        _check_depth(schema)
        source._add((), (reader or SchemaReader()).read(schema), "")
        return source

    def _add(self, path: Path, schema: Any, base: str) -> None:
        if not isinstance(schema, dict | bool):
            raise GrammarError(named(path), f"a schema is an object or a boolean, not {kind(schema)}")
        if isinstance(schema, dict):
            base = self._identify(path, schema, base)
        self.places[path] = Subschema(schema, base)
        for inner, value in _subschemas(path, schema):
            self._add(inner, value, base)

    def _identify(self, path: Path, schema: dict[str, Any], base: str) -> str:
        """Note the names a schema gives itself; returns its base URI."""
        if (name := schema.get("$id")) is not None:
            base, fragment = urldefrag(_join(path, base, _name(path, "$id", name)))
            if fragment:
                raise GrammarUnsupported(named(path), "$id", "an $id with a fragment is not supported; use $anchor")
            self.resources[base] = path
        if (name := schema.get("$anchor")) is not None:
            self.anchors[base, _name(path, "$anchor", name)] = path
        return base

    def target(self, path: Path) -> Path:
        """Where the `$ref` of the schema at `path` points."""
        if path not in self.targets:
            self.targets[path] = self._resolve(path)
        return self.targets[path]

    def _resolve(self, path: Path) -> Path:
        place = self.places[path]
        assert isinstance(place.schema, dict)
        reference = _name(path, "$ref", place.schema["$ref"])
        uri, fragment = urldefrag(_join(path, place.base, reference))
        root = self.resources.get(uri)
        if root is None:
            raise GrammarUnsupported(
                named(path), "$ref", "the reference leads out of the schema, and kvilt fetches nothing; use $defs"
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self.anchors.get((uri, fragment))
        else:
            steps = fragment.split("/")[1:]
            found = (*root, *(step.replace("~1", "/").replace("~0", "~") for step in steps))
        found = found if found is None or found in self.places else _moved(found)
        if found is None or found not in self.places:
            raise GrammarUnsupported(
                named(path), "$ref", f"$ref {reference[:80]!r} points at nothing that kvilt reads as a schema"
            )
        return found

    def check_loops(self, starts: Iterable[Path]) -> None:
        """Refuse references that lead back to a schema without descending into the value: checking would not end."""
        seen: set[Path] = set()
        on_way: set[Path] = set()
        stack: list[tuple[Path, Iterator[Path]]] = []

        def enter(path: Path) -> None:
            if path in on_way:
                raise GrammarError(named(path), "this schema refers to itself without end")
            if path not in seen:
                seen.add(path)
                on_way.add(path)
                stack.append((path, self._same_value(path)))

        for start in starts:
            enter(start)
            while stack:
                path, rest = stack[-1]
                following = next(rest, None)
                if following is not None:
                    enter(following)
                else:
                    stack.pop()
                    on_way.discard(path)

    def _same_value(self, path: Path) -> Iterator[Path]:
        schema = self.places[path].schema
        if isinstance(schema, bool):
            return
        if "$ref" in schema:
            yield self.target(path)
        for keyword in IN_PLACE:
            yield from ((*path, keyword, str(i)) for i in range(len(schema.get(keyword, ()))))


def _moved(path: Path) -> Path:
    """Where a schema stands today that an earlier draft had in a list of items or among dependencies."""
    found = list(path)
    for at, (step, following) in enumerate(itertools.pairwise(path)):
        if step == "items" and following.isdigit():
            found[at] = "prefixItems"
    return tuple({"additionalItems": "items", "dependencies": "dependentSchemas"}.get(step, step) for step in found)


def parse_json(text: str) -> Any:
    """Parse JSON text; duplicate keys, NaN, infinities and numbers that a float cannot hold are refused."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
    except RecursionError:
        raise GrammarTooLarge("json_schema", f"is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError("json_schema", f"is not JSON: {str(error)[:120]}") from None


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inside(each)]
    if level:
        raise GrammarTooLarge("json_schema", f"is nested more than {MAX_DEPTH} deep")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise GrammarError("json_schema", "an object has the same key twice")
    return found


def _float(text: str) -> float:
    value = float(text)
    try:
        exact = Decimal(text) == Decimal(repr(value))  # not where it became infinite either
    except InvalidOperation:  # an exponent that no decimal has
        exact = False
    if not exact:
        raise GrammarTooLarge("json_schema", f"the number {text[:40]} has more digits than a float holds")
    return value


def _constant(text: str) -> float:
    raise GrammarError("json_schema", f"{text} is no JSON")


def _subschemas(path: Path, schema: Schema) -> Iterator[tuple[Path, Any]]:
    """Paths and values of everything directly inside a schema that should be one."""
    if isinstance(schema, bool):
        return
    for keyword, value in schema.items():
        if keyword in ONE:
            yield (*path, keyword), value
        elif keyword in LIST:
            if not isinstance(value, list) or not value:
                raise GrammarError(named(path), f"{keyword} must be a list of schemas that is not empty")
            yield from (((*path, keyword, str(i)), each) for i, each in enumerate(value))
        elif keyword in NAMED:
            if not isinstance(value, Mapping):
                raise GrammarError(named(path), f"{keyword} must be an object of schemas, not {kind(value)}")
            yield from (((*path, keyword, name), each) for name, each in value.items())


def _name(path: Path, keyword: str, value: object) -> str:
    if not isinstance(value, str):
        raise GrammarError(named(path), f"{keyword} must be a string, not {kind(value)}")
    return value


def _join(path: Path, base: str, reference: str) -> str:
    """A reference as an absolute URI; urljoin knows no URNs, whose fragments stand for themselves."""
    if len(base) + len(reference) > MAX_URI:
        raise GrammarTooLarge(named(path), f"a URI may have at most {MAX_URI} characters, with that it is relative to")
    if reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference
