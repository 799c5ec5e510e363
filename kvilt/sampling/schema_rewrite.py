"""Keywords of 2020-12 that can be said with others, which the library enforces: conditions, negations, dependencies.

What cannot be said so stays as it is, and is refused by name later. Refuses to know drafts and the library.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .schema_place import Schema

MAX_UNIQUE = 5  # values whose orders are written out
MAX_EXCLUSIVE = 6  # branches of which each excludes all others
MAX_NUMBERS = 8  # that are excluded one by one
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_IN_PLACE = frozenset(
    ["$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "$dynamicRef", "$recursiveRef"]
)
_ABOUT_NAMES = frozenset(["properties", "patternProperties", "additionalProperties", "unevaluatedProperties"])


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, with what can be said otherwise in an `allOf`; schemas inside are rewritten already."""
    rest = dict(schema)
    parts: list[Schema] = []
    for change in (_unevaluated, _conditions, _negation, _exactly_one, _dependencies, _names, _contained, _unique):
        parts += change(rest)
    parts = [part for part in parts if part is not True]
    if parts:
        rest["allOf"] = [*given, *parts] if isinstance(given := rest.get("allOf", []), list) else given
    return rest


def _conditions(rest: dict[str, Any]) -> list[Schema]:
    then, otherwise = rest.get("then", True), rest.get("else", True)
    if "if" not in rest or (then is True and otherwise is True):
        for keyword in ("if", "then", "else"):
            rest.pop(keyword, None)  # without the others it has no effect
        return []
    condition = rest["if"]
    opposite = negated(condition)
    if opposite is None:
        return []
    for keyword in ("if", "then", "else"):
        rest.pop(keyword, None)
    return [_any_of([_all_of([condition, then]), _all_of([opposite, otherwise])])]


def _negation(rest: dict[str, Any]) -> list[Schema]:
    opposite = negated(rest["not"]) if "not" in rest else None
    if opposite is None:
        return []
    del rest["not"]
    return [opposite]


def _exactly_one(rest: dict[str, Any]) -> list[Schema]:
    """`oneOf` of branches that do not tell their types: each of them, and none of the others."""
    branches = rest.get("oneOf")
    if not isinstance(branches, list) or not 1 < len(branches) <= MAX_EXCLUSIVE or not all(map(_is_untyped, branches)):
        return []
    opposites = [opposite for branch in branches if (opposite := negated(branch)) is not None]
    if len(opposites) < len(branches):
        return []
    del rest["oneOf"]
    others = [[other for j, other in enumerate(opposites) if j != i] for i in range(len(branches))]
    return [_any_of([_all_of([branch, *rest]) for branch, rest in zip(branches, others, strict=True)])]


def _is_untyped(branch: Any) -> bool:
    return isinstance(branch, dict) and not branch.keys() & {"type", "const", "enum"}


def _dependencies(rest: dict[str, Any]) -> list[Schema]:
    """For each name: it is absent, or what depends on it holds."""
    needs, schemas = rest.pop("dependentRequired", {}), rest.pop("dependentSchemas", {})
    held: list[tuple[str, Schema]] = [(name, {"required": names}) for name, names in needs.items() if names]
    held += schemas.items()
    always = rest.get("required", [])
    return [
        then if isinstance(always, list) and name in always else _any_of([{"properties": {name: False}}, then])
        for name, then in held
        if then is not True
    ]


def _names(rest: dict[str, Any]) -> list[Schema]:
    """`propertyNames` where no other keyword speaks of names that are not listed."""
    rule = rest.get("propertyNames")
    if rule is True:
        del rest["propertyNames"]
        return []
    if not isinstance(rule, dict) or rest.keys() & _ABOUT_NAMES - {"additionalProperties"}:
        return []
    own = {key: value for key, value in rule.items() if (key, value) != ("type", "string")}
    others = rest.get("additionalProperties", True)
    match own:
        case {"pattern": str(pattern), **more} if not more:
            named: dict[str, Any] = {"patternProperties": {pattern: others}}
        case {**more} if more and more.keys() <= {"minLength", "maxLength"}:
            low, high = more.get("minLength", 0), more.get("maxLength", "")
            named = {"patternProperties": {f"^[\\s\\S]{{{low},{high}}}$": others}}
        case {"enum": list(names), **more} if not more and all(isinstance(name, str) for name in names):
            named = {"properties": dict.fromkeys(names, others)}
        case _:
            if own:
                return []
            named = {}
    del rest["propertyNames"]
    rest |= {**named, "additionalProperties": False} if named else {}
    return []


def _unevaluated(rest: dict[str, Any]) -> list[Schema]:
    """Where nothing in place evaluates, what is not evaluated is what is additional."""
    if not rest.keys() & _IN_PLACE:
        if "unevaluatedProperties" in rest:
            rest.setdefault("additionalProperties", rest.pop("unevaluatedProperties"))
            rest.pop("unevaluatedProperties", None)
        if "unevaluatedItems" in rest and "contains" not in rest:
            rest.setdefault("items", rest.pop("unevaluatedItems"))
            rest.pop("unevaluatedItems", None)
    return []


def _contained(rest: dict[str, Any]) -> list[Schema]:
    """`minContains` and `maxContains` without `contains` have no effect; none that must be there asks for nothing."""
    if "contains" in rest and rest.get("minContains") == 0 and "maxContains" not in rest:
        del rest["contains"]
    if "contains" not in rest:
        rest.pop("minContains", None)
        rest.pop("maxContains", None)
    return []


def _unique(rest: dict[str, Any]) -> list[Schema]:
    """Different items of few values: the orders that there are."""
    items = rest.get("items")
    if rest.get("uniqueItems") is not True or "prefixItems" in rest or not isinstance(items, dict):
        return []
    values = items.get("enum") if items.keys() <= {"enum", "type"} else None
    if items == {"type": "boolean"}:
        values = [True, False]
    least, most = rest.get("minItems", 0), rest.get("maxItems", MAX_UNIQUE)
    counted = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in (least, most))
    plain = isinstance(values, list) and all(isinstance(value, str | bool) for value in values)
    if counted and isinstance(items.get("enum"), list):
        rest["maxItems"] = min(rest.get("maxItems", len(items["enum"])), len(items["enum"]))
    if not counted or not plain or not values or len(values) > MAX_UNIQUE or not _has_type(items, values):
        return []
    del rest["uniqueItems"]
    orders = itertools.chain.from_iterable(
        itertools.permutations(dict.fromkeys(values), count) for count in range(least, min(most, len(values)) + 1)
    )
    arrays: list[Schema] = [
        {"prefixItems": [{"const": value} for value in order], "items": False, "minItems": len(order)}
        if order
        else {"maxItems": 0}
        for order in orders
    ]
    return [_any_of([{"type": [name for name in _TYPES if name != "array"]}, *arrays])]


def _has_type(items: Mapping[str, Any], values: Sequence[Any]) -> bool:
    """Whether the `type` beside an enum, if there is one, excludes none of its values."""
    given = items.get("type")
    kinds = {"boolean" if isinstance(value, bool) else "string" for value in values}
    return given is None or kinds <= set(given if isinstance(given, list) else [given])


def negated(schema: Any) -> Schema | None:
    """A schema that holds exactly where `schema` does not; None where there is no such schema here."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    options: list[Schema] = []
    for keyword, value in schema.items():
        rule = _OPPOSITES.get(keyword)
        opposite = None if rule is None else rule(value)
        if opposite is None:
            return None
        options.append(opposite)
    return _any_of(options)


def _other_types(value: Any) -> Schema | None:
    given = set(value if isinstance(value, list) else [value])
    if "integer" in given and "number" not in given:
        return None  # numbers with a fraction have no name
    return _typed([name for name in _TYPES if name not in given])


def _other_values(values: Any) -> Schema | None:
    if not isinstance(values, list) or any(isinstance(value, dict | list) for value in values):
        return None
    words = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    booleans = {value for value in values if isinstance(value, bool)}
    if len(numbers) > MAX_NUMBERS:
        return None
    left = {"null": None not in values, "boolean": not booleans, "number": not numbers, "string": not words}
    options: list[Schema] = [_typed([name for name in _TYPES if left.get(name, True)])]
    options += [{"const": value} for value in (True, False) if booleans and value not in booleans]
    options += [{"type": "string", "pattern": f"^{other_than(words)}$"}] if words else []
    for low, high in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        options.append({"type": "number", **{key: value for key, value in bounds.items() if value is not None}})
    return _any_of(options)


def other_than(words: Sequence[str]) -> str:
    """A pattern for all texts but these, as a tree of their beginnings."""
    following: dict[str, list[str]] = {}
    for word in words:
        if word:
            following.setdefault(word[0], []).append(word[1:])
    any_other = "".join(map(_in_class, following))
    options = [] if "" in words else [""]
    options.append(f"[^{any_other}][\\s\\S]*" if any_other else "[\\s\\S]+")
    options += [f"{re.escape(first)}{other_than(rest)}" for first, rest in following.items()]
    return f"(?:{'|'.join(options)})"


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[" else char


def _some_absent(names: Any) -> Schema | None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    absent = _any_of([{"properties": {name: False}} for name in names])
    return absent if absent is False else _all_of([{"type": "object"}, absent])


def _some_different(members: Any) -> Schema | None:
    if not isinstance(members, dict):
        return None
    options: list[Schema] = []
    for name, schema in members.items():
        opposite = negated(schema)
        if opposite is None:
            return None
        if opposite is not False:
            options.append({"type": "object", "properties": {name: opposite}, "required": [name]})
    return _any_of(options)


def _bound(kind: str, keyword: str) -> Callable[[Any], Schema | None]:
    return lambda value: {"type": kind, keyword: value} if _is_number(value) else None


def _count(kind: str, keyword: str, step: int) -> Callable[[Any], Schema | None]:
    def opposite(value: Any) -> Schema | None:
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return {"type": kind, keyword: value + step} if value + step >= 0 else False

    return opposite


def _each(join: Callable[[list[Schema]], Schema]) -> Callable[[Any], Schema | None]:
    def opposite(schemas: Any) -> Schema | None:
        found = [negated(schema) for schema in schemas] if isinstance(schemas, list) else [None]
        known = [schema for schema in found if schema is not None]
        return join(known) if len(known) == len(found) else None

    return opposite


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _typed(names: list[str]) -> Schema:
    return len(names) == len(_TYPES) or ({"type": names} if names else False)


def _any_of(options: list[Schema]) -> Schema:
    left = [option for option in options if option is not False]
    if any(option is True for option in left):
        return True
    return left[0] if len(left) == 1 else {"anyOf": left} if left else False


def _all_of(parts: list[Schema]) -> Schema:
    left = [part for part in parts if part is not True]
    if any(part is False for part in left):
        return False
    return left[0] if len(left) == 1 else {"allOf": left} if left else True


_OPPOSITES: Mapping[str, Callable[[Any], Schema | None]] = {
    "type": _other_types,
    "const": lambda value: _other_values([value]),
    "enum": _other_values,
    "required": _some_absent,
    "properties": _some_different,
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"),
    "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _count("string", "maxLength", -1),
    "maxLength": _count("string", "minLength", 1),
    "minItems": _count("array", "maxItems", -1),
    "maxItems": _count("array", "minItems", 1),
    "not": lambda schema: schema if isinstance(schema, dict | bool) else None,
    "anyOf": _each(_all_of),
    "allOf": _each(_any_of),
}
