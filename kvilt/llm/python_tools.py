"""Tools that are Python functions: their JSON schemas from type hints.

Refuses to know models: a schema goes into a prompt like any other.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import ParamError

Tool = Mapping[str, Any] | Callable[..., Any]  # OpenAI's JSON, or a function
_SIMPLE: Mapping[Any, str] = types.MappingProxyType(
    {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array", None: "null"}
)


def tool_schemas(tools: Sequence[Tool] | None) -> list[Mapping[str, Any]] | None:
    """Tools as OpenAI's JSON has them; None stays None."""
    if tools is None:
        return None
    return [one if isinstance(one, Mapping) else function_schema(one) for one in tools]


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """A function as a tool: its name, its docstring, and its parameters with their types and defaults."""
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise ParamError("tools", f"a tool is a function with a name, or a JSON object, not {function!r:.80}")
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ParamError("tools", f"{name}: the parameter {parameter.name} has no name that a call could give")
        if parameter.name not in hints:
            raise ParamError("tools", f"{name}: the parameter {parameter.name} needs a type hint")
        properties[parameter.name] = type_schema(hints[parameter.name], f"{name}.{parameter.name}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    about = {"description": doc} if (doc := inspect.getdoc(function)) else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters}}


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint; ParamError names a type that JSON does not have."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [one.value for one in hint]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(None if one is types.NoneType else one, where) for one in inner]}
    if origin in (list, Sequence) and len(inner) == 1:
        return {"type": "array", "items": type_schema(inner[0], where)}
    if origin in (dict, Mapping) and len(inner) == 2 and inner[0] is str:
        return {"type": "object", "additionalProperties": type_schema(inner[1], where)}
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    raise ParamError(
        "tools", f"{where}: {hint!r:.60} has no JSON schema; use str, int, float, bool, list, dict, Literal"
    )
