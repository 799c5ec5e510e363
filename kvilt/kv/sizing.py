"""How many pages each layer group gets of the memory for KV. Knows bytes and lengths; refuses to know models.

A group that keeps everything needs pages for the whole of a sequence, a window group for its last tokens. So groups get
pages in the proportion in which sequences of `SEQUENCE_TOKENS` tokens need them. Shorter sequences find the window
groups full first, longer ones the others. A window group gets for each such sequence the pages of its window, of one
more window that a handle or the prefix index keeps, and of `STEP_TOKENS`. For the first sequence it gets the pages of a
whole step of the device: sequences share a step, so that is needed once. Where memory holds less than one such
sequence, it holds one that is as long as possible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from .checkpoints import SEQUENCE_TOKENS
from .layout import KVLayout, LayerGroup
from .row_states import ROW_STATES

STEP_TOKENS = 512
INDEXED_STATES = 4  # of each sequence, beside those of its row
MOST_STATES = 1 << 14  # more than any number of sequences uses; where states are small, pages take the rest


def split_memory(
    layout: KVLayout, memory_bytes: int, max_context: int, step_tokens: int = STEP_TOKENS
) -> tuple[int, ...]:
    """Pages of each group; where all groups need as many, or all have windows, each gets the same number.

    `step_tokens` are the most that a step of the device may add to one sequence.
    """
    if all(group.window_pages is not None for group in layout.groups):
        return (memory_bytes // layout.page_bytes,) * len(layout.groups)

    def first_needed(pages: int) -> list[int]:
        return [_needed(group, pages, max(step_tokens, STEP_TOKENS)) for group in layout.groups]

    def first_bytes(pages: int) -> int:
        return _bytes(layout, first_needed(pages))

    whole = layout.pages_for(min(max_context, SEQUENCE_TOKENS))
    left_bytes = memory_bytes - first_bytes(whole)
    if left_bytes < 0:
        return tuple(first_needed(bisect_right(range(whole), memory_bytes, key=first_bytes) - 1))
    each = [_needed(group, whole, STEP_TOKENS) for group in layout.groups]
    each_bytes = _bytes(layout, each)
    return tuple(n + more * left_bytes // each_bytes for n, more in zip(first_needed(whole), each, strict=True))


def split_states(layout: KVLayout, memory_bytes: int, max_context: int) -> int:
    """Slots for recurrent states: for each sequence what its row holds, and checkpoints that the prefix index keeps."""
    if layout.recurrent is None:
        return 0
    slot_bytes, each = layout.recurrent.shape.slot_bytes, ROW_STATES + INDEXED_STATES
    pages_bytes = layout.pages_for(min(max_context, SEQUENCE_TOKENS)) * layout.page_bytes
    share = each * slot_bytes / (each * slot_bytes + pages_bytes)
    return min(MOST_STATES, int(memory_bytes * share) // slot_bytes)


def _bytes(layout: KVLayout, pages: Sequence[int]) -> int:
    return sum(n * group.shape.page_bytes for n, group in zip(pages, layout.groups, strict=True))


def _needed(group: LayerGroup, pages: int, step_tokens: int) -> int:
    """Pages of a group for a sequence with so many pages, what is kept beside it, and a step."""
    window = group.window_pages
    return pages if window is None else min(pages, 2 * window + -(-step_tokens // group.shape.page_tokens))
