"""Banned token sequences, indexed by which id may not come next.

Knows ids alone, and the end of a history; refuses to know text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BadWords:
    """Sequences by the id that stands before their last one, so that a step looks only at those that may match."""

    always: tuple[int, ...]  # sequences of one id
    after: dict[int, list[tuple[int, ...]]]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> BadWords:
        """An index of these sequences, none of which is empty."""
        after: dict[int, list[tuple[int, ...]]] = {}
        for sequence in sequences:
            if len(sequence) > 1:
                after.setdefault(sequence[-2], []).append(tuple(sequence))
        return cls(tuple(sequence[0] for sequence in sequences if len(sequence) == 1), after)

    def next(self, ids: Sequence[int]) -> list[int]:
        """The ids that would complete a sequence after `ids`; some may stand twice."""
        near = self.after.get(ids[-1], ()) if ids else ()
        return [*self.always, *(sequence[-1] for sequence in near if _ends_with(ids, sequence[:-1]))]


def _ends_with(ids: Sequence[int], end: tuple[int, ...]) -> bool:
    return tuple(ids[-len(end) :]) == end
