"""How many tokens to draft: as many as are likelier accepted than their place in a step costs.

A cost is in seconds that were measured, so how much is drafted may differ from run to run; what is drawn may not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Until both are measured: what a token more costs, against all of a step with one token.
_FIRST_PRICE = 0.35
_FORGET = 0.97  # a step's weight against the one after it
_OUTLIER = 6.0  # a step this much slower than expected was interrupted, and says nothing
_LONGEST_REST = 128  # steps between two probes of what did not pay
# Steps with drafts against those without, of as many rows: how many of each say something, how often one without is
# wanted, and for how long there are none with where they were slower.
_ENOUGH_PLAIN, _ENOUGH_DRAFTED, _ROUND, _SHORT_TRIAL, _LONG_TRIAL = 3, 8, 64, 32, 256


@dataclass(slots=True)
class Rate:
    """Tokens in a second, of the latest steps of a kind."""

    steps: int = 0
    drawn: float = 0.0
    spent_s: float = 0.0

    def count(self, drawn: int, spent_s: float) -> None:
        self.steps += 1
        self.drawn = self.drawn * 0.9 + drawn
        self.spent_s = self.spent_s * 0.9 + spent_s

    @property
    def value(self) -> float:
        return self.drawn / self.spent_s if self.spent_s else 0.0


@dataclass(slots=True)
class Trial:
    """Steps of one number of rows, with and without drafts. What is true of one more draft need not be of the first."""

    plain: Rate = field(default_factory=Rate)
    drafted: Rate = field(default_factory=Rate)
    turn: int = 0
    wake: int = 0
    rest: int = _SHORT_TRIAL

    def pays(self) -> bool:
        """Whether the next step may have drafts."""
        self.turn += 1
        known = self.plain.steps >= _ENOUGH_PLAIN and self.turn % _ROUND > 1
        return known and self.turn >= self.wake

    def count(self, drafts: int, drawn: int, spent_s: float) -> None:
        """A step, which may have shown that drafts make steps of this kind slower."""
        (self.drafted if drafts else self.plain).count(drawn, spent_s)
        if drafts and self.drafted.steps >= _ENOUGH_DRAFTED:
            if self.drafted.value < self.plain.value:
                self.wake, self.rest = self.turn + self.rest, min(_LONG_TRIAL, 2 * self.rest)
                self.drafted = Rate()
            else:
                self.rest = _SHORT_TRIAL


class Cost:
    """What one more token in a step costs, learnt from steps: a line through seconds over tokens."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # of steps, their tokens and seconds
        self._drawn = self._spent_s = 0.0
        self._drafts = self._drafting_s = 0.0
        self._trials: dict[int, Trial] = {}
        self._took_s = 0.0  # by the drafter, for the next step

    @property
    def price(self) -> float:
        """A token's place in a step, in tokens that would be drawn in the same time; 1 is a whole plain row."""
        if not self._spent_s or not self._drawn:
            return _FIRST_PRICE
        own_s = self._drafting_s / self._drafts if self._drafts else 0.0
        return (self._slope_s() + own_s) * self._drawn / self._spent_s

    def pays(self, rows: int) -> bool:
        """Whether a step of so many rows may have drafts: those that had were no slower."""
        return self._trial(rows).pays()

    def _trial(self, rows: int) -> Trial:
        return self._trials.setdefault(rows if rows <= 16 else rows & -4, Trial())

    def stepped(self, rows: int, drafts: int, drawn: int, step_s: float) -> None:
        """A step of decodes alone computed a token of each row and some drafts; `drawn` came out."""
        tokens = rows + drafts
        took_s, self._took_s = self._took_s, 0.0
        if self._weight > 4 and step_s > _OUTLIER * (self._y / self._weight) * max(1.0, tokens / self._mean_x()):
            return
        for name, value in (("_weight", 1.0), ("_x", tokens), ("_y", step_s)):
            setattr(self, name, getattr(self, name) * _FORGET + value)
        self._xx = self._xx * _FORGET + tokens * tokens
        self._xy = self._xy * _FORGET + tokens * step_s
        self._drawn = self._drawn * _FORGET + drawn
        self._spent_s = self._spent_s * _FORGET + step_s + took_s
        self._trial(rows).count(drafts, drawn, step_s + took_s)

    def drafted(self, drafts: int, took_s: float) -> None:
        """A drafter took so long for so many tokens."""
        if drafts:
            self._drafts = self._drafts * _FORGET + drafts
            self._drafting_s = self._drafting_s * _FORGET + took_s
        self._took_s = took_s

    def _mean_x(self) -> float:
        return self._x / self._weight

    def _slope_s(self) -> float:
        """Seconds for one token more; near what is usual as long as all steps had about the same size."""
        mean_x, mean_y = self._mean_x(), self._y / self._weight
        usual_s = _FIRST_PRICE * mean_y / mean_x
        spread = self._xx / self._weight - mean_x * mean_x
        together = self._xy / self._weight - mean_x * mean_y
        return max(0.02 * usual_s, (together + 0.25 * usual_s) / (spread + 0.25))


@dataclass(slots=True)
class Tally:
    """What became of drafts of one grade, the latest first."""

    hope: float
    hits: float = 0.0
    misses: float = 0.0

    @property
    def chance(self) -> float:
        """That one more draft is accepted, if all before it were."""
        return (self.hits + 2 * self.hope) / (self.hits + self.misses + 2)

    def count(self, drafted: int, accepted: int) -> None:
        """Some drafts, of which the first so many were accepted."""
        self.hits = self.hits * 0.8 + accepted
        self.misses = self.misses * 0.8 + (accepted < drafted)


@dataclass(slots=True, eq=False)
class Pace:
    """How one sample's drafts fare, by grade; what does not pay rests, and is probed ever more rarely."""

    tallies: list[Tally]
    steps: int = 0
    rests: list[int] = field(default_factory=list)  # how long each grade rests when it next does not pay
    wakes: list[int] = field(default_factory=list)  # the step at which each grade may be probed again

    @staticmethod
    def of(hopes: Sequence[float]) -> Pace:
        """A pace that begins with hopes."""
        return Pace([Tally(hope) for hope in hopes], 0, [1] * len(hopes), [0] * len(hopes))

    def most(self, price: float, limit: int) -> int:
        """Tokens that may pay now, whatever the grade."""
        return max(self.count(grade, price, limit) for grade in range(len(self.tallies)))

    def count(self, grade: int, price: float, limit: int) -> int:
        """Tokens of this grade that pay now; one where nothing does, if it is time to see whether that still holds."""
        chance = self.tallies[grade].chance
        if chance > price:
            paying = limit if price <= 0 or chance >= 1 else int(math.log(price) / math.log(chance))
            return min(limit, max(1, paying))
        return min(limit, 1) if self.steps >= self.wakes[grade] else 0

    def took(self, grade: int, price: float, drafted: int, accepted: int) -> None:
        """Drafts of a grade were computed, and so many accepted."""
        tally = self.tallies[grade]
        tally.count(drafted, accepted)
        if accepted:
            self.rests[grade] = 1
        elif tally.chance <= price:
            self.wakes[grade] = self.steps + self.rests[grade]
            self.rests[grade] = min(_LONGEST_REST, 2 * self.rests[grade])
