"""Drafters for proofs, which know the truth, nothing, or something in between; and drafts that cost nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from kvilt.sampling.sampler import SamplingState
from kvilt.speculative.cost import DraftCosts, StepPrice
from kvilt.speculative.drafter import Draft, DraftContext


class Free(DraftCosts):
    """As if steps with drafts were the shorter ones: as much is drafted as may be, whatever becomes of it."""

    def price(self, rows: int) -> StepPrice | None:
        return StepPrice(1.0, -0.5, 0.0, 0.0, rows)


class Oracle:
    """Knows what each prompt's first sample goes on with, and lies about some of it."""

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], truth: float, vocab: int, most: int = 6
    ) -> None:
        self._answers, self._truth, self._vocab, self._most = answers, truth, vocab, most
        self._dice = random.Random(7)
        self.live = 0

    @property
    def most(self) -> int:
        return self._most

    @property
    def hopes(self) -> Sequence[float]:
        return (0.9,)

    def begin(self, ids: Sequence[int], state: SamplingState, parent: DraftContext | None = None) -> DraftContext:
        self.live += 1
        return DraftContext(ids, state, tuple(state.history.ids[: state.history.prompt_tokens]))

    def propose(self, draft_contexts: Sequence[DraftContext], k: Sequence[int]) -> list[Draft]:
        return [self._draft(draft_context, count) for draft_context, count in zip(draft_contexts, k, strict=True)]

    def _draft(self, draft_context: DraftContext, count: int) -> Draft:
        known = len(draft_context.ids) - len(draft_context.memory)
        coming = [*self._answers.get(draft_context.memory, ())][known : known + self._dice.randrange(count + 1)]
        return Draft([t if self._dice.random() < self._truth else self._lie() for t in coming])

    def _lie(self) -> int:
        return self._dice.randrange(self._vocab + 3)  # some are no tokens at all

    def forget(self, draft_context: DraftContext) -> None:
        assert draft_context.memory is not None
        draft_context.memory = None
        self.live -= 1

    def close(self) -> None:
        pass


class Broken(Oracle):
    """Fails every time."""

    def propose(self, draft_contexts: Sequence[DraftContext], k: Sequence[int]) -> list[Draft]:
        raise RuntimeError("no idea")
