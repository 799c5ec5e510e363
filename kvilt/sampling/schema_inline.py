"""References where a negation needs what they refer to: written in place, as far as that ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from .schema_place import LIST, NAMED, ONE, Path

MAX_INLINED = 300  # schemas that are written for one keyword
_NAMES_ITSELF = ("$id", "id", "$anchor", "$schema", "$dynamicAnchor", "$recursiveAnchor")
_ONE = (*ONE, "not")


class _Endless(Exception):
    """A reference that leads to itself, elsewhere, or to too much."""


@dataclass(slots=True)
class Inliner:
    """Writes the targets of references into schemas of one document."""

    document: Any
    alone: Callable[[int], bool]  # whether a draft ignores what stands beside a reference
    _open: list[int] = field(default_factory=list)  # targets that are being written
    _left: int = 0

    def inlined(self, schema: Any, path: Path, draft: int) -> Any:
        """A schema without references, if all of them end in the same resource; else as it is."""
        try:
            resource = self._resource(path, draft)
            self._left = MAX_INLINED
            return self._schema(schema, resource, draft)
        except (_Endless, KeyError, IndexError, ValueError, TypeError):
            return schema
        finally:
            self._open.clear()

    def _resource(self, path: Path, draft: int) -> Any:
        """The innermost schema around a path that has a URI of its own: what `#` stands for."""
        node = found = self.document
        key = "id" if draft == 4 else "$id"
        for step in path:
            node = node[int(step)] if isinstance(node, list) else node[step]
            if isinstance(node, dict) and isinstance(node.get("$schema"), str):
                raise _Endless  # of another draft, perhaps
            if isinstance(node, dict) and isinstance(name := node.get(key), str) and not name.startswith("#"):
                found = node
        return found

    def _schema(self, schema: Any, resource: Any, draft: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _Endless
        if not isinstance(schema, dict):
            return schema
        _check_plain(schema)
        rest = {key: self._inside(key, value, resource, draft) for key, value in schema.items() if key != "$ref"}
        if "$ref" not in schema:
            return rest
        target = self._target(schema["$ref"], resource)
        if id(target) in self._open:
            raise _Endless
        self._open.append(id(target))
        found = self._schema(target, resource, draft)
        self._open.pop()
        return found if self.alone(draft) or not rest else {**rest, "allOf": [*rest.get("allOf", []), found]}

    def _inside(self, key: str, value: Any, resource: Any, draft: int) -> Any:
        if key in _ONE and isinstance(value, dict):
            return self._schema(value, resource, draft)
        if key in LIST and isinstance(value, list):
            return [self._schema(each, resource, draft) for each in value]
        if key in NAMED and isinstance(value, dict):
            return {name: self._schema(each, resource, draft) for name, each in value.items()}
        return value

    def _target(self, reference: Any, resource: Any) -> Any:
        """What a reference inside the same resource points at; a schema with a name of its own is another resource."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            raise _Endless
        node = resource
        for step in unquote(reference[2:]).split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            node = node[int(step)] if isinstance(node, list) else node[step]
            _check_plain(node)
        return node


def _check_plain(node: Any) -> None:
    """Refuse a schema with a name of its own: references inside it are relative to that, and to it."""
    if isinstance(node, dict) and any(isinstance(node.get(key), str) for key in _NAMES_ITSELF):
        raise _Endless
