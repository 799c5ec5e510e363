"""How many pages each layer group gets of the memory for KV. Knows bytes and lengths; refuses to know models.

A group that keeps everything needs pages for the whole of a sequence, a window group for its last tokens. So groups get
pages in the proportion in which sequences of `SEQUENCE_TOKENS` tokens need them. Shorter sequences find the window
groups full first, longer ones the others. A window group gets for each such sequence the pages of its window, of one
more window that a handle or the prefix index keeps, and of one step. Where memory holds less than one such sequence,
it holds one that is as long as possible.
"""

from __future__ import annotations

from bisect import bisect_right

from .layout import KVLayout, LayerGroup

SEQUENCE_TOKENS = 8192
STEP_TOKENS = 512


def split_memory(layout: KVLayout, memory_bytes: int, max_context: int) -> tuple[int, ...]:
    """Pages of each group; where all groups need as many, or all have windows, each gets the same number."""
    bounds = [_most_pages(group) for group in layout.groups]
    if None not in bounds:
        return (memory_bytes // layout.page_bytes,) * len(bounds)

    def needed(pages: int) -> list[int]:
        """Pages of each group for a sequence with so many pages."""
        return [pages if bound is None else min(pages, bound) for bound in bounds]

    def sequence_bytes(pages: int) -> int:
        return sum(n * group.shape.page_bytes for n, group in zip(needed(pages), layout.groups, strict=True))

    whole = layout.pages_for(min(max_context, SEQUENCE_TOKENS))
    if memory_bytes < sequence_bytes(whole):
        return tuple(needed(bisect_right(range(whole), memory_bytes, key=sequence_bytes) - 1))
    return tuple(n * memory_bytes // sequence_bytes(whole) for n in needed(whole))


def _most_pages(group: LayerGroup) -> int | None:
    """Pages of a group for one sequence, what is kept beside it, and a step; None: as many as its tokens fill."""
    window = group.window_pages
    return None if window is None else 2 * window + -(-STEP_TOKENS // group.shape.page_tokens)
