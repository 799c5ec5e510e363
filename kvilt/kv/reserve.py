"""Room for the next tokens of several rows: pages, and slots for recurrent states; all of it or none."""

from __future__ import annotations

from collections.abc import Sequence

from .row import CacheRow
from .row_states import RowStates

Steps = Sequence[range | None]


def reserve_rows(
    rows: Sequence[CacheRow],
    counts: Sequence[int],
    steps: Steps,
    owner: str,
    folds: Sequence[range] | None = None,
    drafts: int = 0,
) -> None:
    """Make room for so many tokens of each row; the arguments are those of `KVCache.reserve`."""
    for row, step in zip(rows, steps, strict=True):
        if step is not None:
            row.slide(step)
    pool = rows[0].pool
    needs = [row.pages_needed(count, step) for row, count, step in zip(rows, counts, steps, strict=True)]
    if pool.layout.recurrent is not None:
        _reserve_with_states(rows, counts, steps, needs, owner, folds or _new_tokens(rows, counts, steps), drafts)
    elif any(map(any, needs)):  # not so in most steps of a decode: there is room in its last page
        _hand_out(rows, counts, steps, pool.take([sum(need) for need in zip(*needs, strict=True)], owner))


def _hand_out(rows: Sequence[CacheRow], counts: Sequence[int], steps: Steps, spare: list[list[int]]) -> None:
    """Give taken pages to the rows they were taken for."""
    for row, count, step in zip(rows, counts, steps, strict=True):
        row.reserve(count, spare, step)
    for group, pages in enumerate(spare):  # two rows shared a tail, and the first copy set the second free
        rows[0].pool.drop(group, pages)


def _new_tokens(rows: Sequence[CacheRow], counts: Sequence[int], steps: Steps) -> list[range]:
    """The positions that a step computes where it begins at the length."""
    own = [range(count) if step is None else step for count, step in zip(counts, steps, strict=True)]
    return [range(row.length + one.start, row.length + one.stop) for row, one in zip(rows, own, strict=True)]


def _reserve_with_states(
    rows: Sequence[CacheRow],
    counts: Sequence[int],
    steps: Steps,
    needs: Sequence[Sequence[int]],
    owner: str,
    folds: Sequence[range],
    drafts: int,
) -> None:
    """Also take slots for the states that the next step writes; those of checkpoints only where there are some."""
    pool, held = rows[0].pool, [row.states for row in rows if row.states is not None]
    slots = _slots_needed(held, folds, drafts)
    for passed in (RowStates.drop_dense, RowStates.drop_written):
        if sum(must for must, *_ in slots) > pool.free_states():
            for states, span in zip(held, folds, strict=True):
                passed(states, span)
            slots = _slots_needed(held, folds, drafts)
    if any(map(any, needs)) or any(must for must, *_ in slots):
        spare = pool.take([sum(need) for need in zip(*needs, strict=True)], owner, sum(must for must, *_ in slots))
        taken = spare[pool.layout.state_group]
        for states, (must, *_) in zip(held, slots, strict=True):
            states.spare += [taken.pop() for _ in range(must)]
        _hand_out(rows, counts, steps, spare)
    for states, (_, liked, dense) in zip(held, slots, strict=True):
        more = min(liked, pool.free_states())
        if more := more + min(dense, max(0, pool.empty_states() - more)):
            states.spare += pool.take([0] * pool.layout.state_group, owner, more)[pool.layout.state_group]


def _slots_needed(held: Sequence[RowStates], folds: Sequence[range], drafts: int) -> list[tuple[int, int, int]]:
    return [states.needed(span, drafts) for states, span in zip(held, folds, strict=True)]
