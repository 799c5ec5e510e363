"""The steps of a `tokenizers` pipeline as plain data, for what must know how it treats a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

BLOCK = "▁"  # how SentencePiece writes a space


def steps(part: Any) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as the JSON they stand for."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__())))


def writes_blocks(normalizers: list[Mapping[str, Any]]) -> bool:
    """Whether a normalizer does nothing but write blocks for spaces, and perhaps one before the text."""
    for step in normalizers:
        match step:
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"} | {"type": "Prepend", "prepend": "▁"}:
                pass
            case _:
                return False
    return bool(normalizers) and normalizers[-1]["type"] == "Replace"


def composes(normalizers: list[Mapping[str, Any]]) -> bool:
    """Whether a normalizer does nothing but compose letters and accents, if anything."""
    return all(step["type"] == "NFC" for step in normalizers)


def _flat(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inside = state.get("normalizers", state.get("pretokenizers"))
    if inside is None:
        yield state
    for inner in inside or ():
        yield from _flat(inner)
