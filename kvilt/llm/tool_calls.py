"""The tool calls of an answer, and how calls of Python functions are carried out. Knows no model."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from ..errors import ParamError
from .python_tools import Tool


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A call of a tool that an answer makes; `arguments` are JSON."""

    name: str
    arguments: str


def run_calls(text: str, calls: Sequence[ParsedToolCall], functions: Sequence[Tool]) -> list[dict[str, Any]]:
    """The messages that continue a conversation after an answer with calls: the answer, and the result of each call.

    A function that raises gives its error as the result, so that the model can correct the call.
    """
    known = {one.__name__: one for one in functions if not isinstance(one, Mapping)}
    named = [(_call_id(index, call), call) for index, call in enumerate(calls)]
    asked = [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in named
    ]
    results = [
        {"role": "tool", "tool_call_id": name, "name": call.name, "content": _result(known.get(call.name), call)}
        for name, call in named
    ]
    return [{"role": "assistant", "content": text, **({"tool_calls": asked} if asked else {})}, *results]


def _call_id(index: int, call: ParsedToolCall) -> str:
    """Nine letters and digits, as Mistral's templates demand; the same call has the same id, so prompts repeat."""
    return hashlib.sha256(f"{index} {call.name} {call.arguments}".encode()).hexdigest()[:9]


def _result(function: Callable[..., Any] | None, call: ParsedToolCall) -> str:
    if function is None:
        raise ParamError("functions", f"the model called {call.name!r}, and no function of this name is given")
    try:
        value = function(**_given(function, json.loads(call.arguments or "{}")))
    except Exception as error:  # whatever a caller's function raises is for the model to see
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _given(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with members of enums in the place of their values."""
    hints = get_type_hints(function)
    enums = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, enum.Enum)}
    return {name: enums[name](value) if name in enums else value for name, value in arguments.items()}
