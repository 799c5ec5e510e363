"""What steps take, by their number of rows: without drafts, and how much longer with some.

Learnt from steps that were measured, so how much is drafted may differ from run to run; what is drawn may not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_PRICE = 0.35  # until it is measured: what a draft adds to a step, against a row's share of it
_LOWEST_PRICE = 0.02
_FORGET = 0.9  # a step's weight against the one after it
_FADE = 0.97  # and against a later one of another kind
_OUTLIER = 6.0  # a step this much longer than expected was interrupted, and says nothing
_ENOUGH = 2  # steps without drafts that say what such a step takes
_ROUND = 64  # so often two steps have none, to see whether that still holds


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step of some rows takes without drafts, and what drafts add: something for having any, and for each."""

    plain_s: float
    first_s: float
    each_s: float
    own_s: float  # the drafter's for each
    rows: int

    @property
    def share(self) -> float:
        """A draft's time, in tokens that would be drawn in it without drafts."""
        return (self.each_s + self.own_s) * self.rows / self.plain_s

    def extra_s(self, drafts: int) -> float:
        """How much longer a step with so many drafts takes."""
        return self.first_s + self.each_s * drafts if drafts else 0.0

    def all_s(self, drafts: int) -> float:
        """The same with what the drafter takes for them."""
        return self.extra_s(drafts) + self.own_s * drafts


@dataclass(slots=True)
class RunningMean:
    """Of the latest few."""

    count: int = 0
    weight: float = 0.0
    total: float = 0.0

    def take(self, value: float) -> None:
        self.count += 1
        self.weight = self.weight * _FORGET + 1.0
        self.total = self.total * _FORGET + value

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(slots=True)
class CostLine:
    """Seconds that drafts add over their number: a line through the latest steps, near what is usual at first."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def take(self, drafts: int, extra_s: float) -> None:
        self.weight = self.weight * _FORGET + 1
        self.x = self.x * _FORGET + drafts
        self.y = self.y * _FORGET + extra_s
        self.xx = self.xx * _FORGET + drafts * drafts
        self.xy = self.xy * _FORGET + drafts * extra_s

    def fade(self) -> None:
        """A step without drafts says nothing of them, but makes what is known of them older."""
        for name in ("weight", "x", "y", "xx", "xy"):
            setattr(self, name, getattr(self, name) * _FADE)

    def fit(self, usual_s: float) -> tuple[float, float]:
        """Seconds for having drafts at all, and for each; begun with a step that had none, and a usual one of two."""
        weight, x, xx = self.weight + 1.5, self.x + 1.0, self.xx + 2.0
        y, xy = self.y + usual_s, self.xy + 2 * usual_s
        each_s = max(_LOWEST_PRICE * usual_s, (weight * xy - x * y) / (weight * xx - x * x))
        first_s = (y - each_s * x) / weight
        if first_s < 0:  # the first drafts cost no less than the others
            return 0.0, max(_LOWEST_PRICE * usual_s, xy / xx)
        return first_s, each_s


@dataclass(slots=True)
class StepTimes:
    """Those of one number of rows."""

    plain: RunningMean = field(default_factory=RunningMean)
    line: CostLine = field(default_factory=CostLine)
    own: RunningMean = field(default_factory=RunningMean)  # the drafter's seconds for one token
    count: int = 0
    seen: set[int] = field(default_factory=set)  # numbers of drafts there were
    price: StepPrice | None = None  # as long as nothing new is known


class DraftCosts:
    """What drafts cost, for each number of rows apart: a step of one row waits for memory, a step of many computes."""

    def __init__(self) -> None:
        self._steps: dict[int, StepTimes] = {}
        self._latest = StepTimes()  # in which a drafter's time was measured

    def price(self, rows: int) -> StepPrice | None:
        """For the next step of so many rows; None where it should have no drafts, to learn what it takes without."""
        steps = self._of(rows)
        steps.count += 1
        return self.known(rows) if steps.count % _ROUND > 1 else None

    def known(self, rows: int) -> StepPrice | None:
        """What is known of steps of so many rows; None before any was measured."""
        steps = self._of(rows)
        if steps.price is None and rows and steps.plain.count >= _ENOUGH:
            plain_s = steps.plain.value
            usual_s = _FIRST_PRICE * plain_s / rows
            first_s, each_s = steps.line.fit(usual_s)
            near = steps if steps.own.count else self._latest
            own_s = near.own.value if near.own.count else usual_s
            steps.price = StepPrice(plain_s, first_s, each_s, own_s, rows)
        return steps.price

    def stepped(self, rows: int, drafts: int, step_s: float) -> None:
        """A step of decodes alone computed a token of each row and some drafts.

        The first of its kind is recorded rather than replayed, and takes much longer than later ones.
        """
        steps = self._of(rows)
        if drafts not in steps.seen:
            steps.seen.add(drafts)
            if rows == 1 or not drafts:
                return
        price = self.known(rows)
        if price is not None and step_s > _OUTLIER * (price.plain_s + price.extra_s(drafts)):
            return
        if not drafts:
            steps.plain.take(step_s)
            steps.line.fade()
        elif price is not None:
            steps.line.take(drafts, step_s - price.plain_s)
        steps.price = None

    def drafted(self, rows: int, drafts: int, took_s: float) -> None:
        """A drafter took so long for so many tokens of so many rows."""
        steps = self._of(rows)
        steps.own.take(took_s / drafts)
        steps.price, self._latest = None, steps

    def _of(self, rows: int) -> StepTimes:
        return self._steps.setdefault(rows if rows <= 16 else rows & -4, StepTimes())
