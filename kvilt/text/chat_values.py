"""What callers give to a chat template, copied into plain JSON values within limits. Refuses to know templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ContextOverflow, TemplateError
from .budget import MAX_INT_BITS, TemplateLimits
from .pipeline import clean
from .tokenizer import Tokenizer

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class ValueLimits:
    """Size limits of messages: those of a template, and no more than can fit the context."""

    chars: int
    items: int
    tokenizer: Tokenizer | None = None
    tokens: int = 0  # of the context; with a tokenizer

    @classmethod
    def of(cls, limits: TemplateLimits, tokenizer: Tokenizer | None = None, tokens: int | None = None) -> ValueLimits:
        if tokenizer is None or tokens is None or tokens >= limits.text_chars:
            return cls(limits.text_chars, limits.items)
        return cls(limits.text_chars, limits.items, tokenizer, tokens)

    def check(self, chars: int) -> None:
        """Raise if messages of so many characters are too long."""
        # Most are shorter than the context has tokens: the sizes of all tokens are not looked up for them.
        if self.tokenizer is not None and chars > self.tokens:
            fitting = self.tokenizer.max_bytes(self.tokens)
            if fitting < min(chars, self.chars):
                raise ContextOverflow(self.tokens + 1, self.tokens, at_least=True)
        if chars > self.chars:
            raise TemplateError(f"the messages hold more than {self.chars} characters")


def copied_values(values: dict[str, Any], room: ValueLimits) -> dict[str, Any]:
    """The values rebuilt out of plain JSON types, as far as there is room for them."""
    chars = items = 0

    def copy(value: Any, depth: int) -> Any:
        nonlocal chars, items
        items += 1
        if items > room.items or depth > _MAX_DEPTH:
            raise TemplateError(f"the messages hold more than {room.items} values or nest deeper than {_MAX_DEPTH}")
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TemplateError(f"the messages hold a number of more than {MAX_INT_BITS} bits")
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, str):
            chars += len(value)
            room.check(chars)
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
