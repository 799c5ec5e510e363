"""Whether a schema has a finite value: one that requires itself inside itself has none, and no model could write it.

Errs on the side of yes. Refuses to know keywords that cannot make a value longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import GrammarError
from .schema_place import Path, named
from .schema_source import SchemaDocument

_WORK = 200_000  # looks at schemas; a chain of references that takes more is believed to end


def check_finite(source: SchemaDocument, used: Sequence[Path]) -> None:
    """Refuse a schema without a finite value; `used` are the subschemas that matter, all of them checked."""
    finite: set[Path] = set()
    left, work = list(reversed(used)), 0  # what is referred to stands after what refers
    while work < _WORK:
        work += len(left)
        waiting = []
        for path in left:
            if _ends(source, path, finite):
                finite.add(path)
            else:
                waiting.append(path)
        if () in finite:
            return
        if len(waiting) == len(left):
            raise GrammarError(
                named(()), "every value would go on without end: the schema requires itself inside itself"
            )
        left = waiting


def _ends(source: SchemaDocument, path: Path, finite: set[Path]) -> bool:
    """Whether a schema has a finite value, given schemas of which that is known."""
    schema = source.places[path].schema
    if isinstance(schema, bool):
        return True  # `false` has no values; another check refuses that
    if "$ref" in schema and source.target(path) not in finite:
        return False
    if not all((*path, "allOf", str(i)) in finite for i in range(len(schema.get("allOf", ())))):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any((*path, keyword, str(i)) in finite for i in range(len(schema[keyword]))):
            return False
    return _own_values_end(path, schema, finite)


def _own_values_end(path: Path, schema: dict[str, Any], finite: set[Path]) -> bool:
    types = schema.get("type", "string")
    given = set(types if isinstance(types, list) else [types])
    if given - {"array", "object"} or "const" in schema or "enum" in schema:
        return True
    ways = []
    if "array" in given:
        ways.append(all(inner in finite for inner in _needed_items(path, schema)))
    if "object" in given:
        ways.append(all(inner in finite for inner in _needed_members(path, schema)))
    return any(ways)


def _needed_items(path: Path, schema: dict[str, Any]) -> list[Path]:
    least = schema.get("minItems", 0)
    first = len(schema.get("prefixItems", ()))
    needed: list[Path] = [(*path, "prefixItems", str(i)) for i in range(first) if i < least]
    return [*needed, (*path, "items")] if least > first and "items" in schema else needed


def _needed_members(path: Path, schema: dict[str, Any]) -> list[Path]:
    properties = schema.get("properties", {})
    return [(*path, "properties", name) for name in schema.get("required", ()) if name in properties]
