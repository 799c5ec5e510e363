"""What callers give to a chat template, copied into plain JSON values within limits. Refuses to know templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ContextOverflow, InputError, TemplateError
from .budget import MAX_INT_BITS, TemplateLimits
from .pipeline import clean
from .tokenizer import Tokenizer

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class ValueLimits:
    """Size limits of messages: those of a template, and no more than can fit the context."""

    chars: int
    items: int
    tokens: int | None = None  # the context, where it is what sets `chars`

    @classmethod
    def of(cls, limits: TemplateLimits, tokenizer: Tokenizer | None = None, tokens: int | None = None) -> ValueLimits:
        if tokenizer is None or tokens is None or tokens >= limits.text_chars:
            return cls(limits.text_chars, limits.items)
        most = tokenizer.max_bytes(tokens)
        return cls(min(limits.text_chars, most), limits.items, tokens if most < limits.text_chars else None)

    def overflow(self) -> InputError:
        if self.tokens is None:
            return TemplateError(f"the messages hold more than {self.chars} characters")
        return ContextOverflow(self.tokens + 1, self.tokens, at_least=True)


def copied_values(values: dict[str, Any], room: ValueLimits) -> dict[str, Any]:
    """The values rebuilt out of plain JSON types, as far as there is room for them."""
    left = [room.chars, room.items]

    def copy(value: Any, depth: int) -> Any:
        left[1] -= 1
        if left[1] < 0 or depth > _MAX_DEPTH:
            raise TemplateError(f"the messages hold more than {room.items} values or nest deeper than {_MAX_DEPTH}")
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TemplateError(f"the messages hold a number of more than {MAX_INT_BITS} bits")
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, str):
            left[0] -= len(value)
            if left[0] < 0:
                raise room.overflow()
            return clean(str.__str__(value))
        if isinstance(value, Mapping):
            return {_key(key): copy(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
            return [copy(inner, depth + 1) for inner in value]
        raise TemplateError(f"the messages hold a {type(value).__name__}; only text, numbers, lists and objects can be")

    return {name: copy(value, 0) for name, value in values.items()}


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TemplateError(f"the messages hold an object with the key {key!r}; keys must be strings")
    return clean(key)
