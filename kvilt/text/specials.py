"""Texts of special tokens: where they occur in a text.

Knows strings and ids; refuses to know templates and tokenizers.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
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

    def split(self, text: str, user_spans: Sequence[tuple[int, int]] = ()) -> list[str | int]:
        """Cut `text` at its special tokens (leftmost, then longest): plain strings and ids, in order.

        None of them has a character of `user_spans`, which are ascending.
        """
        parts: list[str | int] = []
        at = 0
        for start, end in self._find(text, user_spans):
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

    def _find(self, text: str, user_spans: Sequence[tuple[int, int]] = ()) -> Iterator[tuple[int, int]]:
        """Non-overlapping occurrences outside of `user_spans`, longest at each place."""
        at = 0
        while self._first is not None and (match := self._first.search(text, at)):
            start = match.start()
            near = bisect_right(user_spans, start, key=itemgetter(1))  # the first that ends behind this place
            room, behind = user_spans[near] if near < len(user_spans) else (len(text), 0)
            if room <= start:
                at = behind
                continue
            lengths = self._lengths[text[start]]
            fits = (start + n for n in reversed(lengths) if start + n <= room)
            end = next((end for end in fits if text[start:end] in self.ids), None)
            if end is not None:
                yield start, end
            at = start + 1 if end is None else end
