"""Constraints on generated text: six kinds, as frozen values.

Checked for shape and size when they are made. Refuses to know tokens, and what a schema or a grammar means: compiling
it finds that out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ParamError

MAX_TEXT_BYTES = 1 << 18
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema accepts; given as a mapping, a bool or JSON text, kept as text.

    `close_objects` adds `additionalProperties: false` where a schema names properties and says nothing of others.
    """

    schema: str | bool | Mapping[str, Any]
    close_objects: bool = False

    def __post_init__(self) -> None:
        given = self.schema
        text = given if isinstance(given, str) else _json_text(given)
        object.__setattr__(self, "schema", _text("json_schema", text))

    @property
    def text(self) -> str:
        """The schema as JSON text, its keys in the caller's order."""
        assert isinstance(self.schema, str)
        return self.schema


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches from its beginning to its end."""

    pattern: str

    def __post_init__(self) -> None:
        _text("regex", self.pattern)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some strings."""

    choices: Sequence[str]

    def __post_init__(self) -> None:
        given = self.choices
        if not isinstance(given, list | tuple):
            raise ParamError("choice", f"must be a list of strings, not {type(given).__name__}")
        if not 1 <= len(given) <= MAX_CHOICES:
            raise ParamError("choice", f"must hold 1 to {MAX_CHOICES} strings, not {len(given)}")
        texts = tuple(dict.fromkeys(_text("choice", choice) for choice in given))
        if sum(map(len, texts)) > MAX_TEXT_BYTES:
            raise ParamError("choice", f"may hold at most {MAX_TEXT_BYTES} characters in all")
        object.__setattr__(self, "choices", texts)


@dataclass(frozen=True, slots=True)
class Lark:
    """Text that a grammar in llguidance's variant of Lark derives from its rule `start`."""

    grammar: str

    def __post_init__(self) -> None:
        _text("lark", self.grammar)


@dataclass(frozen=True, slots=True)
class Gbnf:
    """Text that a grammar in llama.cpp's GBNF derives from its rule `root`."""

    grammar: str

    def __post_init__(self) -> None:
        _text("gbnf", self.grammar)


Constraint = JsonSchema | JsonObject | Regex | Choice | Lark | Gbnf
CONSTRAINTS = (JsonSchema, JsonObject, Regex, Choice, Lark, Gbnf)


def by_name(name: str, value: Any) -> Constraint | None:
    """The constraint that a keyword like `json_schema=...` stands for; None where it is off (None, or False)."""
    if value is None:
        return None
    match name:
        case "json_schema":
            return value if isinstance(value, JsonSchema) else JsonSchema(value)
        case "json_object":
            if not isinstance(value, bool):
                raise ParamError(name, f"must be True or False, not {type(value).__name__}")
            return JsonObject() if value else None
        case "regex":
            return Regex(value)
        case "choice":
            return Choice(value)
        case "lark":
            return Lark(value)
        case _:
            return Gbnf(value)


SHORT_NAMES = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf")


def _json_text(value: object) -> str:
    if not isinstance(value, Mapping | bool):
        raise ParamError("json_schema", f"must be a schema or its JSON text, not {type(value).__name__}")
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParamError("json_schema", f"cannot be written as JSON: {str(error)[:120]}") from None


def _text(name: str, text: object) -> str:
    """A text that UTF-8 can write and that is neither empty nor too long."""
    if not isinstance(text, str):
        raise ParamError(name, f"must be a string, not {type(text).__name__}")
    if not text:
        raise ParamError(name, "must not be empty")
    if len(text) > MAX_TEXT_BYTES:
        raise ParamError(name, f"may have at most {MAX_TEXT_BYTES} characters, not {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ParamError(name, "holds half of a surrogate pair, which is no text") from None
    return text
