"""Changes to JSON values that keep them JSON: one place anywhere in it gets another value, goes, or comes twice."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)),
    *(
        0.5,
        -0.0,
        1e308,
        1e-320,
        "",
        "a",
        "\x00",
        "\ud800",
        "é",
        "x" * 300,
        "float16",
        "F32",
        [],
        {},
        [0],
        [[]],
        {"a": 1},
    ),
)


def changed(value: Any, dice: random.Random) -> Any:
    """A copy of `value` with one to three changes."""
    made = copy.deepcopy(value)
    for _ in range(dice.choice([1, 1, 2, 3])):
        made = _change(made, dice)
    return made


def _change(value: Any, dice: random.Random) -> Any:
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        match dice.randrange(10):
            case 0:
                del value[key]
            case 1:
                value[dice.choice(["", "a", key + "x"])] = value[key]
            case _:
                value[key] = _change(value[key], dice)
        return value
    if isinstance(value, list) and value and dice.random() < 0.85:
        at = dice.randrange(len(value))
        match dice.randrange(8):
            case 0:
                del value[at]
            case 1:
                value[at:at] = [copy.deepcopy(value[at])] * dice.choice([1, 1, 50])
            case 2:
                value.reverse()
            case _:
                value[at] = _change(value[at], dice)
        return value
    return _other(value, dice)


def _other(value: Any, dice: random.Random) -> Any:
    if type(value) is int and dice.random() < 0.5:
        return value + dice.choice([-1, 1, 8, -8, 2**32])
    if isinstance(value, str) and value and dice.random() < 0.4:
        at = dice.randrange(len(value))
        return value[:at] + dice.choice(["", "\x00", "é", "9", value]) + value[at + 1 :]
    if dice.random() < 0.05:
        nested: Any = 1
        for _ in range(dice.choice([40, 70, dice.randrange(900, 1000)])):
            nested = [nested]
        return nested
    return copy.deepcopy(dice.choice(ODD))


def dumped(value: Any, dice: random.Random) -> bytes:
    """As JSON in one of the ways that JSON may be written; deep values by hand, because the encoder refuses them."""
    try:
        if dice.random() < 0.8:
            return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        return json.dumps(value, indent=dice.choice([None, 1])).encode()
    except RecursionError:
        return _deep(value)


def _deep(value: Any) -> bytes:
    """Iteratively; what is no list or object is left to the encoder."""
    parts: list[bytes] = []
    stack: list[Any] = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, bytes):
            parts.append(one)
        elif isinstance(one, list):
            inner = [piece for item in one for piece in (b",", item)][1:]
            stack += [b"]", *reversed(inner), b"["]
        elif isinstance(one, dict):
            inner = [piece for key, item in one.items() for piece in (b",", key, b":", item)][1:]
            stack += [b"}", *reversed(inner), b"{"]
        else:
            parts.append(json.dumps(one).encode())
    return b"".join(parts)
