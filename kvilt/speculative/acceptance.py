"""Acceptance of one sample's drafts: how likely one more is accepted, and when to probe a grade that does not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_LONGEST_REST = 128  # steps between two probes of what did not pay


@dataclass(slots=True)
class AcceptanceTally:
    """Accepted and rejected drafts of one grade; later ones weigh more."""

    hope: float
    keep: float = 0.8  # a draft's weight against the one after it
    hits: float = 0.0
    misses: float = 0.0

    @property
    def chance(self) -> float:
        """That one more draft is accepted, if all before it were."""
        return (self.hits + 2 * self.hope) / (self.hits + self.misses + 2)

    def sure(self, others: AcceptanceTally) -> float:
        """The same as far as it was seen, here or with others."""
        seen = others.hits / (others.hits + others.misses + 1)
        return (self.hits + 2 * seen) / (self.hits + self.misses + 2)

    def count(self, drafted: int, accepted: int) -> None:
        """Some drafts, of which the first so many were accepted."""
        self.hits = self.hits * self.keep + accepted
        self.misses = self.misses * self.keep + (accepted < drafted)


@dataclass(slots=True, eq=False)
class AcceptanceRate:
    """Acceptance of one sample's drafts by grade; a grade that does not pay rests, and is probed ever more rarely."""

    tallies: list[AcceptanceTally]
    best: float = 0.0  # the highest chance of any grade
    steps: int = 0
    rests: list[int] = field(default_factory=list)  # how long each grade rests when it next does not pay
    wakes: list[int] = field(default_factory=list)  # the step at which each grade may be probed again

    @staticmethod
    def of(hopes: Sequence[float], keep: float = 0.8) -> AcceptanceRate:
        """A pace that begins with hopes."""
        return AcceptanceRate(
            [AcceptanceTally(hope, keep) for hope in hopes], max(hopes), 0, [1] * len(hopes), [0] * len(hopes)
        )

    def chance(self, grade: int) -> float:
        """That one more draft of this grade is accepted, if all before it were."""
        return self.tallies[grade].chance

    def sure(self, grade: int, others: AcceptanceRate) -> float:
        """The same as far as it was seen, here or with others."""
        return self.tallies[grade].sure(others.tallies[grade])

    def surest(self, others: AcceptanceRate) -> float:
        """The highest of any grade."""
        return max(map(AcceptanceTally.sure, self.tallies, others.tallies))

    def is_due(self, grade: int) -> bool:
        """Whether it is time to see if what did not pay does now."""
        return self.steps >= self.wakes[grade]

    @property
    def any_due(self) -> bool:
        return self.steps >= min(self.wakes)

    def took(self, grade: int, drafted: int, accepted: int, probed: bool) -> None:
        """Drafts of a grade were computed, and so many accepted; or one was probed that was not expected to pay."""
        self.tallies[grade].count(drafted, accepted)
        self.best = max(tally.chance for tally in self.tallies)
        if accepted:
            self.rests[grade] = 1
        elif probed:
            self.wakes[grade] = self.steps + self.rests[grade]
            self.rests[grade] = min(_LONGEST_REST, 2 * self.rests[grade])
