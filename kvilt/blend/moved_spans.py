"""Spans of tokens that stand in two texts at different places: what can be moved when text between them was cut out.

Knows tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GRAM = 16  # tokens by which equal spans are found
MIN_SPAN = 32  # tokens of a span that is worth moving


@dataclass(frozen=True, slots=True)
class MovedSpan:
    """Tokens that stood at `old` and stand at `new` now."""

    new: int
    old: int
    length: int


def moved_spans(old: Sequence[int], new: Sequence[int], begin: int, least: int = MIN_SPAN) -> list[MovedSpan]:
    """Spans of `old` that stand in `new` behind its first `begin` tokens, in the same order; the longest come greedily.

    Looks at each position of both once: a table of the spans of 16 tokens in `old`, and one walk through `new`.
    """
    before, after = np.asarray(old, dtype=np.int64), np.asarray(new, dtype=np.int64)
    grams = _grams(before)
    places: dict[int, list[int]] = {}
    for at in range(len(grams)):
        places.setdefault(int(grams[at]), []).append(at)
    wanted = _grams(after)
    found: list[MovedSpan] = []
    at, floor = begin, 0
    while at < len(wanted):
        span = _longest(before, after, at, [p for p in places.get(int(wanted[at]), ()) if p >= floor])
        if span is None or span.length < least:
            at += 1
            continue
        found.append(span)
        at, floor = span.new + span.length, span.old + span.length
    return found


def _longest(before: NDArray[np.int64], after: NDArray[np.int64], at: int, starts: Sequence[int]) -> MovedSpan | None:
    best: MovedSpan | None = None
    for start in starts[:8]:  # a text that repeats itself is looked at a few times only
        most = min(len(before) - start, len(after) - at)
        differ = np.flatnonzero(before[start : start + most] != after[at : at + most])
        length = int(differ[0]) if differ.size else most
        if best is None or length > best.length:
            best = MovedSpan(at, start, length)
    return best


def _grams(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """A hash of the tokens that begin at each place; equal hashes are compared afterwards."""
    if len(ids) < GRAM:
        return np.empty(0, dtype=np.int64)
    hashed = np.zeros(len(ids) - GRAM + 1, dtype=np.int64)
    with np.errstate(over="ignore"):
        for offset in range(GRAM):
            hashed = hashed * np.int64(1_000_003) + ids[offset : offset + len(hashed)]
    return hashed
