"""How many tokens to draft for each row of a step, given what drafts cost and how likely they are accepted.

As many as draw the most tokens a second, as long as every row gets at least as far as it would without any drafts: a
row that gains nothing from drafts does not wait for those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cost import StepPrice

_WORTH = 1.04  # times the tokens a second of a step without drafts; less is not worth the noise
# In steps without drafts: what a row may lose before it has gained anything, in each step, on hope for its own drafts,
# and in all; and what it may spend later of what it gained.
CREDIT, _PATIENCE, _HOPE, _DEEPEST, _HIGHEST = 1.0, 0.01, 1.0, -4.0, 64.0


@dataclass(frozen=True, slots=True)
class DraftBid:
    """A row that draws: how likely each further draft is accepted, how many there are, how far ahead the row is."""

    chance: float
    sure: float  # the same from measurements alone: other rows may wait for this much
    most: int
    ahead_s: float
    probe: bool = False  # one is to be tried, whether it pays or not


def possible(bids: Sequence[DraftBid], price: StepPrice) -> bool:
    """Whether any row may get a draft at all."""
    least_s = price.all_s(1)
    return all(least_s <= bid.ahead_s + _worth(bid, bid.most) * price.plain_s for bid in bids)


def allot(bids: Sequence[DraftBid], price: StepPrice) -> list[int]:
    """Drafts for each row that are expected to pay."""
    ranked = _ranked(bids, price)
    taken = _best(ranked, len(bids), price)
    while taken:
        counts = _counts(ranked[:taken], len(bids))
        if no_row_waits(bids, counts, price):
            return counts
        taken = taken * 3 // 4
    return [0] * len(bids)


def probe(bids: Sequence[DraftBid], counts: Sequence[int], price: StepPrice) -> list[int]:
    """The counts, with one draft for each row that is due for a probe, if no row waits for that."""
    tried = list(counts)
    for place, bid in enumerate(bids):
        if bid.probe and bid.most and not tried[place]:
            tried[place] = 1
            if not no_row_waits(bids, tried, price):
                tried[place] = 0
    return tried


def no_row_waits(bids: Sequence[DraftBid], counts: Sequence[int], price: StepPrice) -> bool:
    """Whether every row, as far as is known, is no later after the step than it would be without drafts."""
    extra_s = price.all_s(sum(counts))
    return all(
        extra_s <= bid.ahead_s + _worth(bid, count) * price.plain_s for bid, count in zip(bids, counts, strict=True)
    )


def _worth(bid: DraftBid, count: int) -> float:
    """Steps without drafts that a row may spend on so many of its own: what they are sure to gain, and some hope."""
    if not count:
        return 0.0
    return min(_gain(bid.sure, count) + _HOPE, _gain(max(bid.chance, bid.sure), count))


def moved(ahead_s: float, accepted: int, extra_s: float, plain_s: float) -> float:
    """How far a row is ahead of a run without drafts, after a step that drafts made longer by so much."""
    after_s = ahead_s + (accepted + _PATIENCE) * plain_s - extra_s
    return min(max(after_s, _DEEPEST * plain_s), _HIGHEST * plain_s)


def _ranked(bids: Sequence[DraftBid], price: StepPrice) -> list[tuple[float, int]]:
    """Every draft that may pay, the likeliest first: its chance, and the place of its row."""
    lowest, ranked = price.share / 2, []
    for place, bid in enumerate(bids):
        likely = bid.chance
        for _ in range(bid.most):
            if likely <= lowest:
                break
            ranked.append((likely, place))
            likely *= bid.chance
    return sorted(ranked, reverse=True)


def _best(ranked: Sequence[tuple[float, int]], rows: int, price: StepPrice) -> int:
    """How many of them draw the most tokens a second."""
    best, taken, drawn = _WORTH * rows / price.plain_s, 0, float(rows)
    for count, (likely, _) in enumerate(ranked, 1):
        drawn += likely
        rate = drawn / (price.plain_s + price.all_s(count))
        if rate >= best:
            best, taken = rate, count
    return taken


def _counts(ranked: Sequence[tuple[float, int]], rows: int) -> list[int]:
    counts = [0] * rows
    for _, place in ranked:
        counts[place] += 1
    return counts


def _gain(chance: float, count: int) -> float:
    """Tokens that so many drafts are likely to draw."""
    if chance >= 1:
        return float(count)
    return chance * (1 - chance**count) / (1 - chance)
