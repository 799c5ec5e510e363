"""A JSON schema of any draft as one of 2020-12 that says the same, and what of it says nothing.

Drafts 04, 06, 07, 2019-09 and 2020-12 are read with their own meaning. A keyword or a format that a draft does not know
is an annotation, as JSON Schema says: it is left out and noted. Refuses to know how a schema is enforced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from .formats import FORMATS
from .schema_place import LIST, NAMED, ONE, Path, kind, named
from .schema_rewrite import rewritten

MAX_CONDITIONS = 4  # `if` and `not` inside each other: each of them writes what it holds twice
MAX_WARNINGS = 20

_DRAFTS: Mapping[str, int] = {
    "draft-04/schema": 4,
    "draft-06/schema": 6,
    "draft-07/schema": 7,
    "draft/2019-09/schema": 2019,
    "draft/2020-12/schema": 2020,
    "schema": 2020,
}
UNSAID = 0  # no $schema: 2020-12, with forms of earlier drafts that mean nothing else today

# The keywords that hold schemas, with those that are rewritten or refused later.
_ONE = (
    *(*ONE, "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_NAMED = (*NAMED, "dependentSchemas")
_CONDITIONS = ("if", "not")
_MORE = frozenset(
    [
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"),
        *("if", "dependentSchemas"),
    ]
)
_SILENT = frozenset(
    [
        *("$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("contentMediaType", "contentEncoding", "contentSchema", "discriminator"),
    ]
)
_EVERYWHERE = frozenset(
    [
        *("$schema", "$ref", "$defs", "definitions", "type", "enum", "multipleOf", "maximum", "exclusiveMaximum"),
        *("minimum", "exclusiveMinimum", "maxLength", "minLength", "pattern", "items", "maxItems", "minItems"),
        *("uniqueItems", "maxProperties", "minProperties", "required", "properties", "patternProperties"),
        *("additionalProperties", "allOf", "anyOf", "oneOf", "not", "format"),
    ]
)
_TIMES: Mapping[str, tuple[int, int]] = {  # the first and the last draft that has a keyword
    "id": (4, 4),
    "additionalItems": (4, 2019),
    "dependencies": (4, 2020),
    **dict.fromkeys(("$id", "const", "contains", "propertyNames"), (6, 2020)),
    **dict.fromkeys(("if", "then", "else"), (7, 2020)),
    **dict.fromkeys(("$anchor", "dependentRequired", "dependentSchemas", "minContains", "maxContains"), (2019, 2020)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$vocabulary"), (2019, 2020)),
    **dict.fromkeys(("$recursiveRef", "$recursiveAnchor"), (2019, 2019)),
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor", "prefixItems"), (2020, 2020)),
}


@dataclass(slots=True)
class SchemaReader:
    """Reads one document; `warnings` are what it leaves out, each with the first place where it stands."""

    warnings: dict[str, str] = field(default_factory=dict)
    close_objects: bool = False  # objects that do not speak of other properties have none

    def read(self, schema: Any) -> Any:
        """The same schema in 2020-12, without what has no effect."""
        return self._schema(schema, UNSAID, (), 0)

    def notes(self) -> tuple[str, ...]:
        """What was left out, in sentences."""
        shown = [f"{what} at {where}" for what, where in self.warnings.items()]
        more = len(shown) - MAX_WARNINGS
        return (*shown[:MAX_WARNINGS], *([f"and {more} more"] if more > 0 else []))

    def _schema(self, schema: Any, draft: int, path: Path, conditions: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(named(path), f"a schema is an object or a boolean, not {kind(schema)}")
        draft = _draft_of(schema, draft, path)
        if conditions > MAX_CONDITIONS:
            raise GrammarTooLarge("json_schema", f"may have at most {MAX_CONDITIONS} of if and not inside each other")
        modern = self._modern(self._known(schema, draft, path), draft, path)
        inner = {key: self._inside(key, value, draft, path, conditions) for key, value in modern.items()}
        if self.close_objects and path[-2:-1] != ("allOf",) and _names_all(inner):
            inner["additionalProperties"] = False
        return rewritten(inner)

    def _inside(self, key: str, value: Any, draft: int, path: Path, conditions: int) -> Any:
        """The value of a keyword, with the schemas in it read as well."""
        deeper = conditions + (key in _CONDITIONS)
        if key in _ONE:
            return self._schema(value, draft, (*path, key), deeper)
        if key in LIST and isinstance(value, list):
            return [self._schema(each, draft, (*path, key, str(i)), deeper) for i, each in enumerate(value)]
        if key in _NAMED and not isinstance(value, dict):
            raise GrammarError(named(path), f"{key} must be an object of schemas, not {kind(value)}")
        if key == "dependentRequired":
            _check_names(path, value)
        if key in _NAMED:
            return {name: self._schema(each, draft, (*path, key, name), deeper) for name, each in value.items()}
        return value

    def _modern(self, schema: dict[str, Any], draft: int, path: Path) -> dict[str, Any]:
        """The keywords of earlier drafts under the names and in the forms of today."""
        found = dict(schema)
        if "$ref" in found and draft in (4, 6, 7):
            self._only_reference(found, draft, path)
        if draft == 4 and isinstance(found.get("id"), str):
            found["$id"] = found.pop("id")
        if draft in (4, 6, 7) and isinstance(name := found.get("$id"), str) and name.startswith("#"):
            found["$anchor"] = found.pop("$id")[1:]
        if draft in (UNSAID, 4):
            _numbers_that_are_excluded(found)
        if draft != 2020:
            _items_in_a_list(found)
        if isinstance(given := found.get("dependencies"), dict):
            del found["dependencies"]
            lists = {name: each for name, each in given.items() if isinstance(each, list)}
            schemas = {name: each for name, each in given.items() if name not in lists}
            found |= {"dependentRequired": {**lists, **found.get("dependentRequired", {})}} if lists else {}
            found |= {"dependentSchemas": {**schemas, **found.get("dependentSchemas", {})}} if schemas else {}
        return found

    def _only_reference(self, found: dict[str, Any], draft: int, path: Path) -> None:
        """Up to draft-07 nothing beside a `$ref` has a meaning, but schemas there may be referred to."""
        for key in [key for key in found if key not in ("$ref", "$defs", "definitions", "$schema")]:
            if key not in _SILENT and (key in _EVERYWHERE or key in _TIMES):
                self._note(f"{key} beside $ref means nothing in draft-0{draft}", path)
            del found[key]

    def _known(self, schema: dict[str, Any], draft: int, path: Path) -> dict[str, Any]:
        """The keywords that have a meaning in this draft; what has none is noted."""
        found = {}
        for key, value in schema.items():
            since, until = (0, 2020) if key in _EVERYWHERE else _TIMES.get(key, (9999, 0))
            if key in _SILENT:
                continue
            if key == "format" and isinstance(value, str) and value not in FORMATS:
                self._note(f"the format {_shown(value)} is not enforced", path)
            elif not since <= (draft or 2020) <= until and not (draft == UNSAID and key == "additionalItems"):
                self._note(f"the keyword {_shown(key)} is not known and has no effect", path)
            else:
                found[key] = value
        return found

    def _note(self, what: str, path: Path) -> None:
        self.warnings.setdefault(what, "#" + "".join(f"/{step[:40]}" for step in path)[:160])


def _draft_of(schema: Mapping[str, Any], draft: int, path: Path) -> int:
    """The draft of a schema: its own, or that of the one around it."""
    if "$schema" not in schema:
        return draft
    name = schema["$schema"]
    text = name.strip().removesuffix("#") if isinstance(name, str) else ""
    found = _DRAFTS.get(text.removeprefix("https://json-schema.org/").removeprefix("http://json-schema.org/"))
    if found is None:
        what = "this $schema is not supported; kvilt reads draft-04, 06, 07, 2019-09 and 2020-12"
        raise GrammarUnsupported(named(path), "$schema", what)
    return found


def _check_names(path: Path, value: Any) -> None:
    lists = list(value.values()) if isinstance(value, dict) else [value]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        raise GrammarError(named(path), "dependentRequired must be an object of lists of strings")


def _numbers_that_are_excluded(found: dict[str, Any]) -> None:
    """In draft-04 `exclusiveMinimum` says whether `minimum` itself is excluded."""
    for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool):
            excluded = found.pop(exclusive)
            if excluded and plain in found:
                found[exclusive] = found.pop(plain)


def _items_in_a_list(found: dict[str, Any]) -> None:
    """Up to 2019-09 `items` may be a list, and `additionalItems` is about what follows it."""
    rest = found.pop("additionalItems", None)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        found |= {} if rest is None else {"items": rest}
        if not found["prefixItems"]:
            del found["prefixItems"]


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether a schema names the properties of an object, and nothing else may speak of more."""
    return "properties" in schema and not _MORE & schema.keys()


def _shown(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")
