"""Texts of special tokens: where they occur in a text, and where user text could form one.

Knows strings and ids; refuses to know templates and tokenizers.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter


@dataclass(frozen=True, slots=True)
class StripRule:
    """Whether a special token strips white space on its left or right (lstrip and rstrip of an added token)."""

    left: bool = False
    right: bool = False


_NO_TRIM = StripRule()
_BLANK = re.compile(r"\s*")


class SpecialTexts:
    """A fixed set of special-token texts, searched without regard to how many there are."""

    def __init__(self, ids: Mapping[str, int], trims: Mapping[str, StripRule] | None = None) -> None:
        self.ids = {text: i for text, i in ids.items() if text}
        self._trims = dict(trims or {})
        lengths: dict[str, set[int]] = {}
        for text in self.ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: tuple(sorted(found)) for first, found in lengths.items()}
        firsts = "".join(re.escape(first) for first in self._lengths)
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._forward = sorted(self.ids)
        self._backward = sorted(text[::-1] for text in self.ids)
        self._longest = max(map(len, self.ids), default=0)

    def split(self, text: str) -> list[str | int]:
        """Cut `text` at its special tokens (leftmost, then longest): plain strings and ids, in order."""
        parts: list[str | int] = []
        at = 0
        for start, end in self._find(text):
            literal = text[start:end]
            trim = self._trims.get(literal, _NO_TRIM)
            before = text[at:start]
            parts.append(before.rstrip() if trim.left else before)
            parts.append(self.ids[literal])
            at = end
            if trim.right:
                at = at if (blank := _BLANK.match(text, at)) is None else blank.end()
        parts.append(text[at:])
        return [part for part in parts if part != ""]

    def unsafe_positions(self, text: str) -> list[int]:
        """Indices of characters that, once replaced, leave no way for `text` to hold, start or end a special token."""
        points: set[int] = set()
        last = -1
        # Taking the one that ends first and breaking its last character breaks every one that overlaps it there.
        for start, end in sorted(self._inside(text), key=itemgetter(1)):
            if start > last:
                last = end - 1
                points.add(last)
        if _leans(text[-self._longest :], self._forward):
            points.add(len(text) - 1)
        if _leans(text[: self._longest][::-1], self._backward):
            points.add(0)
        return sorted(points)

    def _find(self, text: str) -> Iterator[tuple[int, int]]:
        """Non-overlapping occurrences, longest at each place."""
        at = 0
        while self._first is not None and (match := self._first.search(text, at)):
            start = match.start()
            lengths = self._lengths[text[start]]
            end = next((start + n for n in reversed(lengths) if text[start : start + n] in self.ids), None)
            if end is not None:
                yield start, end
            at = start + 1 if end is None else end

    def _inside(self, text: str) -> Iterator[tuple[int, int]]:
        """The shortest occurrence at every place where one starts, overlapping ones included."""
        if self._first is None:
            return
        for match in self._first.finditer(text):
            start = match.start()
            lengths = self._lengths[text[start]]
            end = next((start + n for n in lengths if text[start : start + n] in self.ids), None)
            if end is not None:
                yield start, end


def _leans(tail: str, ordered: list[str]) -> bool:
    """Whether some end of `tail` is a proper beginning of one of the `ordered` texts."""
    for n in range(1, len(tail) + 1):
        end = tail[-n:]
        at = bisect_left(ordered, end)
        if at < len(ordered) and ordered[at] == end:
            at += 1
        if at < len(ordered) and ordered[at].startswith(end):
            return True
    return False
