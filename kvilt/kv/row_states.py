"""The recurrent states of one row: the committed one, checkpoints below it, and those that steps wrote since.

A state is replaced, never changed in place: a step reads a committed slot and writes spare ones, and a commit chooses
among them. So a step that is cancelled, fails or is half rejected leaves the committed state. Private to this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import InputError
from ..ops.contract import KeysValues
from .pool import PagePool

# A row holds its state, the one that the next step writes, and two checkpoints: the last end of a page, and one more.
ROW_STATES = 4
_CHECKPOINTS = 2
FROM_ZERO = -1  # the slot that a row starts from at position 0


@dataclass(frozen=True, slots=True)
class StateFold:
    """What a step does to the state of one row: where it starts from, and after which positions it is written."""

    read: int
    writes: dict[int, int]  # position -> slot


@dataclass(frozen=True, slots=True)
class RowStateImages:
    """Recurrent states outside any pool; each counts as one token of `numbers`."""

    positions: tuple[int, ...]  # ascending: how many tokens are folded into each
    numbers: KeysValues


class RowStates:
    """States by the position up to which tokens are folded into them."""

    __slots__ = ("_group", "_pool", "committed", "spare", "wanted", "written")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._group = pool.layout.state_group
        self.committed: dict[int, int] = {}  # position -> slot
        self.written: dict[int, int] = {}  # the same, since the last commit
        self.spare: list[int] = []
        self.wanted: set[int] = set()  # ends of pages at which a caller wants a checkpoint

    def slots(self) -> list[int]:
        """All slots it holds."""
        return [*self.committed.values(), *self.written.values(), *self.spare]

    def newest(self, length: int) -> int:
        """The position of the newest state up to `length`; 0 where there is none, and all tokens are folded again."""
        return max((position for position in self.committed if position <= length), default=0)

    def find(self, position: int) -> int | None:
        """The slot that a step at this position starts from; None where no state ends there."""
        if position == 0:
            return FROM_ZERO
        return self.committed.get(position, self.written.get(position))

    def is_checkpoint(self, position: int) -> bool:
        """Whether a state at this position is kept for later."""
        return position in self.wanted or self._pool.checkpoints.has(position)

    # Before a step.

    def outlasts(self, position: int) -> bool:
        """Whether a state here stays known after the row has passed it; a dense one does while slots are empty."""
        if position in self.wanted or self._pool.checkpoints.is_regular(position):
            return True
        return self._pool.checkpoints.has(position) and self._pool.empty_states() > 0

    def needed(self, span: range, drafts: int) -> tuple[int, int, int]:
        """Slots to take before a step over these positions: those it cannot do without, those it would like, and
        those it takes if they are empty."""
        if not span:
            return 0, 0, 0
        self._recycle(p for p in self.written if p < span.start and not self.is_checkpoint(p))
        must, liked = max(0, 1 - len(self.spare)), 1 + len(self._regular(span)) + drafts
        left = max(1, len(self.spare)) - liked  # spare slots behind those, or how many there are too few
        dense = len(self._pool.checkpoints.dense_inside(span))
        return must, max(0, -left), max(0, dense - max(0, left))

    def drop_dense(self, span: range) -> None:
        """Give back the dense checkpoints of earlier steps that no commit has chosen: a row needs their slots."""
        regular = self._pool.checkpoints.is_regular
        self._give_back(p for p in self.written if p < span.start and p not in self.wanted and not regular(p))

    def drop_written(self, span: range) -> None:
        """Give back all checkpoints of earlier steps that no commit has chosen."""
        self._give_back(p for p in self.written if p < span.start)

    def _give_back(self, positions: Iterable[int]) -> None:
        """Keep one slot to write to, and let other rows have the rest."""
        self._recycle(positions)
        self._pool.drop(self._group, self.spare[1:])
        del self.spare[1:]

    def fold(self, span: range, last: int) -> StateFold:
        """Choose slots for a step over these positions: for the state at its end, then after each of the `last`
        tokens, which may be drafts, then for checkpoints, as long as there are spare slots."""
        read = self.find(span.start)
        assert read is not None, "a fold starts where a state is"
        places = [*range(span.stop, max(span.start, span.stop - last), -1), *self._regular(span)]
        places += self._pool.checkpoints.dense_inside(span)
        self._recycle(p for p in self.written if span.start < p <= span.stop and p not in places)
        writes: dict[int, int] = {}
        for position in places:
            if position in self.written or self.spare:
                writes[position] = self.written[position] if position in self.written else self.spare.pop()
                self.written[position] = writes[position]
        if span.stop not in writes:
            raise InputError("there is no slot for the state after this row; reserve() takes one before each step")
        return StateFold(read, writes)

    def _regular(self, span: range) -> list[int]:
        """Checkpoints between the ends of a step that a caller wants, then regular ones, the last ones first."""
        wanted = sorted((p for p in self.wanted if span.start < p < span.stop), reverse=True)
        return list(dict.fromkeys((*wanted, *self._pool.checkpoints.regular_inside(span))))

    # After a step.

    def commit(self, length: int) -> None:
        """Keep what was written up to `length`; `prune` drops what the row need not hold."""
        for position in sorted(self.written):
            slot = self.written.pop(position)
            if position > length:
                self.spare.append(slot)
                continue
            if position in self.committed:
                self._release(self.committed.pop(position))
            self.committed[position] = slot

    def prune(self, length: int) -> None:
        """Hold the state of the row and the newest checkpoints; other slots are used again or given back."""
        if not self.committed:
            return
        newest, size = self.newest(length), self._pool.page_tokens
        tail = max((p for p in self.committed if p < newest and p % size == 0), default=0)
        checkpoints = sorted(p for p in self.committed if p < newest and p != tail and self.is_checkpoint(p))
        kept = {newest, tail, *checkpoints[-(_CHECKPOINTS - 1) :]}
        for position in [p for p in self.committed if p not in kept]:
            self._release(self.committed.pop(position))
        self.wanted = {p for p in self.wanted if p > length or p in self.committed}
        self._pool.drop(self._group, self.spare[ROW_STATES - 1 :])
        del self.spare[ROW_STATES - 1 :]

    def _release(self, slot: int) -> None:
        """Use a slot again if no other handle sees it."""
        if self._pool.is_sole(self._group, slot):
            self.spare.append(slot)
        else:
            self._pool.drop(self._group, [slot])

    def _recycle(self, positions: Iterable[int]) -> None:
        self.spare += [self.written.pop(position) for position in list(positions)]

    # Cutting, sharing, leaving.

    def truncate(self, length: int) -> None:
        """Forget states past `length`, and all that no commit has chosen."""
        gone = [self.committed.pop(p) for p in list(self.committed) if p > length]
        self._pool.drop(self._group, [*gone, *self.written.values(), *self.spare])
        self.written.clear()
        self.spare.clear()
        self.wanted = {p for p in self.wanted if p in self.committed}

    def share_with(self, child: RowStates) -> None:
        """Another row begins with the same committed states."""
        child.committed, child.wanted = dict(self.committed), {p for p in self.wanted if p in self.committed}
        self._pool.share(self._group, child.committed.values())

    def adopt(self, position: int, slot: int) -> None:
        """Hold one more state, which a cache holds or an index keeps already."""
        self._pool.share(self._group, [slot])
        self.committed[position] = slot

    def swap(self, position: int, slot: int) -> None:
        """Hold an equal state instead of the own one at this position."""
        self._pool.share(self._group, [slot])
        self._pool.drop(self._group, [self.committed[position]])
        self.committed[position] = slot

    def positions(self) -> tuple[int, ...]:
        """Where committed states are, ascending."""
        return tuple(sorted(self.committed))


def check_fold(states: RowStates, positions: Sequence[int], length: int) -> None:
    """Raise unless a step over these positions can be folded into a row's state."""
    start = positions[0]
    if len(positions) != positions[-1] - start + 1:
        raise InputError("a model with recurrent state computes every token of a row in order; leave no position out")
    if states.find(start) is None:
        at = states.newest(length)
        raise InputError(f"no recurrent state ends at position {start}; the row's next token to compute is at {at}")
