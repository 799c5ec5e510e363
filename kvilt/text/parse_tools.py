"""Tools as requests give them: `{"type": "function", "function": {"name": ..., "parameters": schema}}`, or the inside.

Refuses to know what a schema means: it is text for the grammar compiler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ParamError

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each tool's arguments by its name; ParamError names the tool that is broken."""
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ParamError(f"tools[{i}]", "must be a function with a name")
        if name in found:
            raise ParamError(f"tools[{i}]", f"there are two tools called {name[:64]!r}; rename one")
        found[name] = _schema(i, function.get("parameters"))
    return found


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Each tool's parameters in the order of its schema, with their types; a type that is not one word is empty."""
    found = {}
    for name, schema in functions(tools).items():
        properties = schema.get("properties")
        found[name] = {key: _type(each) for key, each in properties.items()} if isinstance(properties, Mapping) else {}
    return found


def argument_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The JSON schema of each tool's arguments as text, by its name: what `tool_grammar` will ask to be enforced."""
    found = {}
    for name, schema in functions(tools).items():
        try:
            found[name] = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ParamError(f"tool {name[:64]!r}", f"its parameters are no JSON: {str(error)[:120]}") from None
    return found


def _type(schema: object) -> str:
    found = schema.get("type") if isinstance(schema, Mapping) else None
    return found if isinstance(found, str) else ""


def _schema(i: int, parameters: object) -> Mapping[str, Any]:
    if parameters is None:
        return _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise ParamError(f"tools[{i}].parameters", f"must be a JSON schema, not {type(parameters).__name__}")
    if not parameters:
        return _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise ParamError(f"tools[{i}].parameters", "must have the type object: arguments have names")
    return {"type": "object", **parameters}
