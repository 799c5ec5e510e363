"""JSON objects from files that are not trusted: bounded in size and depth, and an object or nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import WeightError

_MAX_BYTES = 64 << 20
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises WeightError with the file's name as the field."""
    return _object(_read(path), path.name)


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise WeightError(path.name, f"is larger than {_MAX_BYTES >> 20} MiB, which no configuration needs")
        raw = path.read_bytes()
    except OSError as error:
        raise WeightError(path.name, f"cannot be read ({error.strerror or error})") from error
    return _parse(raw, path.name)


def read_objects(path: Path) -> list[dict[str, Any]]:
    """The JSON array of objects in `path`."""
    found = _read(path)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise WeightError(path.name, "must be a JSON array of objects")
    return found


def parse_object(raw: bytes, field: str) -> dict[str, Any]:
    """The JSON object in `raw`; no key may stand twice in one object, and every text can be written again."""
    return _object(_parse(raw, field), field)


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WeightError(field, "must be a JSON object")
    return value


def _parse(raw: bytes, field: str) -> Any:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
        if _HALF.search(raw):
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise WeightError(field, f"is not sound JSON ({error})") from error
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
