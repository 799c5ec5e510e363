"""A feed-forward of experts: a router chooses, for each token, the few blocks that compute it.

Each expert reads its weights once a step, for the tokens that chose it. A token's sum goes through its experts in
ascending order, so its result does not depend on what other tokens chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .layers import DenseFeedForward, LayerContext, Linear, Norm
from .spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum over a token's experts of weight * expert(x)."""

    spec: ExpertsSpec
    router: Linear
    experts: tuple[DenseFeedForward, ...]

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: Norm | None = None
    ) -> Tensor:
        """The experts of `x`, which is normalized first, plus `residual`."""
        x = x if norm is None else norm(x, context.ops)
        weights, chosen = self._route(x, context)
        out = torch.zeros_like(x) if residual is None else residual.clone()
        for index in sorted(set(chosen.flatten().tolist())):
            tokens, place = (chosen == index).nonzero(as_tuple=True)
            made = self.experts[index](x[tokens], context.of(tokens))
            out.index_add_(0, tokens, made * weights[tokens, place, None].to(made.dtype))
        return out

    def _route(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """The weights [tokens, top_k] and numbers of the experts that each token goes to."""
        scores = context.linear(x, self.router).float().softmax(-1)
        weights, chosen = scores.topk(self.spec.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True) if self.spec.normalized else weights, chosen


FeedForward: TypeAlias = DenseFeedForward | Experts
