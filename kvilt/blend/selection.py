"""Which tokens of a prompt with documents are computed again: scores of its tokens by strategy, and the best of them.

Masks, scores and indices are over the tokens after the exact ones. Refuses to know how scores are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .recipe import BlendPrompt, Recipe, Strategy
from .select import budget, choose, deviations

# Attention prefers near tokens, whatever they say, and a late token costs more: at this position a token counts half.
FAR_TOKENS = 1000


class TokenSelection:
    """Selects the tokens of one prompt that are computed again."""

    def __init__(self, blend_prompt: BlendPrompt, recipe: Recipe, context_prefix: Sequence[int] | None) -> None:
        """`context_prefix` are the tokens that stood before documents when they were computed; None: not known."""
        self._prompt = blend_prompt
        self._recipe = recipe
        self._context_prefix = None if context_prefix is None else tuple(context_prefix)
        self.reusable = self._mask([(one.start, one.stop) for one in blend_prompt.documents])

    def of(self, scores: Mapping[Strategy, Tensor], ratio: float, among: Tensor | None = None) -> Tensor:
        """What is computed again, as ascending indices."""
        settled, taken = self._settled(), self.always()
        count = max(0, budget(min(1.0, ratio), int(self.reusable.sum())) - int((taken & self.reusable).sum()))
        allowed = torch.ones_like(taken)
        if among is not None:
            allowed[:] = False
            allowed[among] = True
        parts = self._recipe.parts
        for part in parts:
            share = count if part is parts[-1] else budget(part.share, count)
            own = torch.where(settled, -torch.inf, scores[part.strategy])
            best = choose(own, self.reusable & allowed & ~taken, share)
            taken[best] = True
            count -= len(best)
        return taken.nonzero().flatten()

    # Scores.

    def heads(self) -> Tensor:
        """The earlier in its document, the better."""
        score = torch.zeros(len(self._prompt.ids))
        for one in self._prompt.documents:
            score[one.start : one.stop] = -torch.arange(len(one), dtype=torch.float32)
        return score[self._prompt.exact :]

    def attended(self, mass: Tensor) -> Tensor:
        """What the question attends to, of all the prompt's tokens."""
        return (mass / (1 + torch.arange(len(mass)) / FAR_TOKENS))[self._prompt.exact :]

    def changed(self, fresh: Tensor, at: Tensor, stored: Tensor) -> Tensor:
        """How much values of one layer changed, for the tokens `at`, which have `fresh` ones; 0 for others."""
        score = torch.zeros(len(self.reusable))
        score[at] = deviations(fresh, stored[at.to(stored.device)], self.reusable[at]).cpu()
        return score

    # Masks.

    def _mask(self, spans: Sequence[tuple[int, int]]) -> Tensor:
        mask = torch.zeros(len(self._prompt.ids), dtype=torch.bool)
        for start, stop in spans:
            mask[start:stop] = True
        return mask[self._prompt.exact :]

    def always(self) -> Tensor:
        """Tokens that are computed whatever their score: those without KV, the last, the first of each document."""
        first = self._recipe.first_tokens
        mask = ~self.reusable | self._mask(
            [(one.start, min(one.start + first, one.stop)) for one in self._prompt.documents]
        )
        mask[-1] = True  # its logits are what the prompt is computed for
        return mask

    def _settled(self) -> Tensor:
        """Documents after the same tokens as when they were computed: their KV is exact already."""
        own = [one for one in self._prompt.documents if self._prompt.ids[: one.start] == self._context_prefix]
        return self._mask([(one.start, one.stop) for one in own])
