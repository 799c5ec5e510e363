"""Places in a JSON schema: where schemas stand in it, and how messages name them and what stands there."""

from __future__ import annotations

from typing import Any

Path = tuple[str, ...]
Schema = dict[str, Any] | bool

# Where the value of an enforced keyword holds schemas: itself, its items, or its values.
ONE = ("items", "additionalProperties")
LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
IN_PLACE = ("allOf", "anyOf", "oneOf")  # about the same value as the schema they stand in


def kind(value: object) -> str:
    """The JSON type of a wrong value: never the value itself."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def named(path: Path) -> str:
    """A place as a message names it."""
    text = "#"
    for step in path:
        text += f"/{step[:100]}"
        if len(text) > 100:
            return f"json_schema at {text[:97]}..."
    return f"json_schema at {text}"
