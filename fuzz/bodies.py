"""JSON bodies: a body is read as a strict reference reads it, or refused by a typed error where the reference refuses.

The reference is `json.loads` with the checks written out plainly, without regard for time.
"""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

from kvilt.server.http.body import parse_json
from kvilt.server.http.errors import HTTPError

from .driver import main
from .target import Finding, Target, label
from .values import changed, dumped

_MAX_DEPTH, _MAX_KEYS = 64, 4096


_LONG_NUMBER = re.compile(rb"[0-9.eE+-]{1000}")


class _Doubt(Exception):
    """The reference refuses."""


class _Undecided(Exception):
    """The reference has no opinion."""


def reference(body: bytes) -> Any:
    """What a body means, if there is no doubt about it."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise _Doubt(str(error)) from None
    _check(value, 1)
    if _LONG_NUMBER.search(body):
        raise _Undecided  # a limit of kvilt's own, in numbers; inside of a text it means nothing
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs) or len(pairs) > _MAX_KEYS:
        raise _Doubt("keys")
    return dict(pairs)


def _constant(name: str) -> Any:
    raise _Doubt(name)


def _check(value: Any, depth: int) -> None:
    match value:
        case dict() | list():
            if depth > _MAX_DEPTH:
                raise _Doubt("depth")
            for one in [*value, *value.values()] if isinstance(value, dict) else value:
                _check(one, depth + 1)
        case bool() | None:
            pass
        case int():
            if not -(2**63) <= value < 2**63:
                raise _Doubt("range")
        case float():
            if not math.isfinite(value):
                raise _Doubt("range")
        case str():
            if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
                raise _Doubt("text")


def check(data: bytes) -> str:
    try:
        expected = reference(data)
    except _Doubt:
        expected = _Doubt
    except _Undecided:
        expected = _Undecided
    try:
        found = parse_json(data)
    except HTTPError as error:
        if expected not in (_Doubt, _Undecided) and error.status_code != 413:
            raise Finding(f"refused ({error}) though {expected!r:.200} is sound") from None
        return f"refused: {label(error)}"
    if expected is _Doubt:
        raise Finding(f"read as {found!r:.200} though it is doubtful")
    if expected is not _Undecided and not _equal(found, expected):
        raise Finding(f"read as {found!r:.200}, not {expected!r:.200}")
    return f"read {type(found).__name__}"


def _equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return bool(left == right)


def seeds() -> list[bytes]:
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": 'hi \\ " é \ud83e\uddf5'}],
        "temperature": 0.5,
        "n": 2,
    }
    deep = "[" * 64 + "]" * 64
    texts = [
        json.dumps(chat),
        json.dumps(chat, ensure_ascii=True),
        deep,
        "[" + deep + "]",
        '{"a":1,"a":2}',
        '"\\ud800"',
    ]
    texts += ["[1e400]", "[9223372036854775807, -9223372036854775808]", "[NaN]", ' {"a" : [ ] } ', '["' + '\\"' * 100]
    return [text.encode("utf-8", "surrogatepass") for text in texts] + [b'{"a":"\xff"}', b"\xef\xbb\xbf{}"]


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Another value, written soundly, or many of the same mark."""
    if dice.random() < 0.2:
        mark = dice.choice([b'\\"', b"[", b'"', b"\\", b'{"a":', b"[],", b'"a":1,', b"\\u0000", b"\\ud800"])
        return dice.choice([b"", b'["', b"["]) + mark * dice.choice([3, 64, 65, 4096, 30_000]) + data[:100]
    try:
        return dumped(changed(json.loads(data), dice), dice)
    except (ValueError, RecursionError):
        return mutate(dice.choice(seeds()[:3]), dice)


WORDS = (
    b'"messages":[',
    b"\\ud83e\\uddf5",
    b"\\u0000",
    b'\\"',
    b"\\\\",
    b"\xef\xbb\xbf",
    b"-",
    b"e+5",
    b"1.",
    b".5",
    b"01",
)
TARGET = Target("bodies", check, seeds, WORDS, mutate, most_bytes=1 << 17)

if __name__ == "__main__":
    main(TARGET)
