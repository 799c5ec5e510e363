"""What tests of grammars share: a vocabulary of bytes, JSON written through a matcher, and random texts out of one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import torch
from jsonschema import Draft202012Validator, ValidationError, validators

from kvilt.sampling.grammar import Compiler, Grammar
from kvilt.sampling.matcher import Matcher, masks

END = 256
BYTES = [bytes([i]) for i in range(256)] + [b"", b""]  # then the end of text, and a token that is no text


def byte_compiler(**options: Any) -> Compiler:
    return Compiler(BYTES, [END], **options)


def allowed(matcher: Matcher, vocab_size: int = len(BYTES)) -> list[int]:
    """The tokens that may come next."""
    ids: list[int] = masks([matcher], vocab_size)[0].nonzero()[:, 0].tolist()
    return ids


def follow(matcher: Matcher, tokens: Sequence[int]) -> Matcher | None:
    """A fork that has taken these tokens; None if the grammar does not allow them."""
    fork = matcher.fork()
    for token in tokens:
        if token not in allowed(fork):
            return None
        fork.accept(token)
    return fork


def takes(grammar: Grammar, text: str) -> bool:
    """Whether a text is one that the grammar describes."""
    end = _put(grammar.matcher(), text)
    return end is not None and end.accepting


def _put(matcher: Matcher, text: str) -> Matcher | None:
    """`follow` for text in bytes, without masks: a matcher refuses what is not allowed."""
    fork = matcher.fork()
    try:
        for byte in text.encode():
            fork.accept(byte)
    except ValueError:
        return None
    return fork


def takes_value(grammar: Grammar, value: Any) -> bool:
    """Whether a JSON value can be written in some way: keys in some order, numbers with or without spare zeros."""
    return any(end.accepting for end in _written(grammar.matcher(), value))


def _written(matcher: Matcher, value: Any) -> Iterator[Matcher]:
    match value:
        case dict():
            if (inside := _put(matcher, "{")) is not None:
                yield from _members(inside, value, list(value), "")
        case list():
            if (inside := _put(matcher, "[")) is not None:
                yield from _items(inside, value, "")
        case int() | float() if not isinstance(value, bool):
            yield from filter(None, (_put(matcher, text) for text in _numerals(value)))
        case _:
            if (end := _put(matcher, json.dumps(value, ensure_ascii=False))) is not None:
                yield end


def _members(matcher: Matcher, value: dict[str, Any], left: list[str], comma: str) -> Iterator[Matcher]:
    if not left and (end := _put(matcher, "}")) is not None:
        yield end
    for key in left:
        if (inside := _put(matcher, f"{comma}{json.dumps(key, ensure_ascii=False)}:")) is not None:
            for end in _written(inside, value[key]):
                yield from _members(end, value, [other for other in left if other != key], ",")


def _items(matcher: Matcher, left: list[Any], comma: str) -> Iterator[Matcher]:
    if not left:
        if (end := _put(matcher, "]")) is not None:
            yield end
    elif (inside := _put(matcher, comma)) is not None:
        for end in _written(inside, left[0]):
            yield from _items(end, left[1:], ",")


def _numerals(value: int | float) -> list[str]:
    whole = int(value) if value == int(value) else value
    plain = f"{Decimal(repr(whole)):f}"
    return [plain, f"{plain}0", f"{plain}00"] if "." in plain else [plain, f"{plain}.0"]


LIKELY = {**dict.fromkeys(b"0123456789", 1.0), **dict.fromkeys(b'abc"', 6.0), **dict.fromkeys(b"{[:,", 4.0)}
LIKELY |= {**dict.fromkeys(b"}]", 8.0), END: 20.0}


def random_text(grammar: Grammar, dice: random.Random, most: int = 300, dead_ends: bool = False) -> str | None:
    """Some text of a grammar, token by token out of what its masks allow; None if it becomes too long or stops."""
    matcher, drawn = grammar.matcher(), bytearray()
    while len(drawn) < most:
        ids = allowed(matcher)
        if dead_ends and not ids:
            return None
        assert ids, f"nothing may follow {bytes(drawn)!r}"
        token = dice.choices(ids, [LIKELY.get(i, 0.05 if i < 128 else 0.005) for i in ids])[0]
        if token == END:
            return drawn.decode()
        matcher.accept(token)
        drawn.append(token)
    return None


def _multiple_of(_: Any, divisor: float, value: Any, __: Any) -> Iterator[ValidationError]:
    """As the specification has it: the package divides floats, which finds 0.3 to be no multiple of 0.1."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and Fraction(repr(value)) % Fraction(repr(divisor)) != 0:
        yield ValidationError("is no multiple")


Validator = validators.extend(Draft202012Validator, {"multipleOf": _multiple_of})


def peaked(vocab_size: int, *ids: int) -> torch.Tensor:
    """Logits [1, vocab] that like some tokens, the first most."""
    logits = torch.zeros(1, vocab_size)
    for rank, token in enumerate(ids):
        logits[0, token] = 50.0 - rank
    return logits
