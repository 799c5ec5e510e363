"""Prompt lookup: what followed the last tokens when they stood in a prediction, the prompt or the answer before.

Needs no model. Pays where answers repeat what they were given: edits, quotes, code, summaries, lists.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, islice

from ..sampling.sampler import SamplingState
from .drafter import Draft, DraftContext
from .suffix import SuffixIndex

# The longer the match, the surer the draft: the shortest match of each grade, and what may be hoped of it.
_GRADES = (2, 4, 8, 16)
_HOPES = (0.45, 0.6, 0.75, 0.9)
# Tokens of a long prompt that one step reads into an index, so that other rows hardly wait for it (about 10 ms).
_AT_ONCE = 4096


class NgramDrafter:
    """Each sample has an index of its own tokens, and of no other sample's."""

    def __init__(self, most: int = 16) -> None:
        self._most = most

    @property
    def most(self) -> int:
        return self._most

    @property
    def hopes(self) -> Sequence[float]:
        return _HOPES

    def begin(self, ids: Sequence[int], state: SamplingState, parent: DraftContext | None = None) -> DraftContext:  # noqa: ARG002
        return DraftContext(ids, state, SuffixIndex())

    def propose(self, draft_contexts: Sequence[DraftContext], k: Sequence[int]) -> list[Draft]:
        left, drafts = _AT_ONCE, []
        for draft_context, count in zip(draft_contexts, k, strict=True):
            index: SuffixIndex = draft_context.memory
            known, whole = len(index.text), len(draft_context.predicted) + len(draft_context.ids)
            for token in islice(chain(draft_context.predicted, draft_context.ids), known, known + left):
                index.append(token)
            read = len(index.text) - known
            left -= read
            first = read if not known or len(index.text) < whole else 0
            drafts.append(_draft(index, count, first) if len(index.text) == whole else Draft(read=first))
        return drafts

    def forget(self, draft_context: DraftContext) -> None:
        draft_context.memory = None

    def close(self) -> None:
        pass


def _draft(index: SuffixIndex, count: int, read: int) -> Draft:
    grade = bisect_right(_GRADES, index.match.length) - 1
    return Draft(read=read) if grade < 0 else Draft(index.continuation(count), grade, read)
