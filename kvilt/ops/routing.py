"""Which experts each token goes to, and with what weights: the values that backends exchange, and plain torch.

One token's choice depends on its own logits alone. Among equal scores the expert with the lower number wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .values import LinearMap

# "chosen_softmax" is a softmax over the logits of the chosen experts alone; with "chosen_sigmoid" logits choose, and
# their sigmoids are the weights. Sigmoids of large logits are equal, and would choose others.
RouterScores = Literal["softmax", "sigmoid", "chosen_softmax", "chosen_sigmoid"]
# A group of experts counts by its best one, or by the sum of its two best.
GroupScore = Literal["best", "two_best"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How the logits of a router become experts and their weights."""

    top_k: int
    scores: RouterScores = "softmax"
    normalized: bool = True  # the weights are divided by their sum
    epsilon: float = 0.0  # added to that sum
    floor: float = 0.0  # the least that the sum counts as
    scale: float = 1.0  # of the weights, at last
    groups: int = 1  # of neighbouring experts
    top_groups: int = 1  # only the experts of the best groups are chosen from
    group_score: GroupScore = "best"


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of each token in ascending order, which is the order their results are added in."""

    chosen: Tensor  # [tokens, top_k] int32
    weights: Tensor  # [tokens, top_k] float32

    def unweighted(self) -> Routed:
        """The same experts, whose results are added as they are."""
        return Routed(self.chosen, torch.ones_like(self.weights))


# An expert's maps: gate, up and down.
ExpertMaps: TypeAlias = tuple[LinearMap, LinearMap, LinearMap]
# What an expert that all tokens use made [tokens, hidden], and the logits of its weights [tokens, 1]; None: it is 1.
SharedExpert: TypeAlias = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """All experts of a block, as a backend keeps them."""

    maps: tuple[ExpertMaps, ...]
    handle: Any = None  # what the backend's kernels know them by
    asks_the_host: bool = True  # the host reads which experts were chosen before they can run


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, factors: Tensor | None = None) -> Routed:
    """The experts that logits [tokens, experts] choose; `bias` [experts] moves the choice and not the weights.

    Each expert's weight is multiplied by its own of `factors` [experts], at last.
    """
    logits = logits.float()
    scores = _scores(logits, routing)
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), float("-inf"))
    chosen = _largest(choice, routing.top_k).sort(-1).values
    weights = scores.gather(-1, chosen)
    if routing.scores == "chosen_softmax":
        weights = weights.softmax(-1)
    if routing.scores == "chosen_sigmoid":
        weights = weights.sigmoid()
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon).clamp(min=routing.floor)
    weights = weights * routing.scale
    return Routed(chosen.int(), weights if factors is None else weights * factors[chosen])


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    match routing.scores:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case "chosen_softmax" | "chosen_sigmoid":
            return logits


def _in_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Whether each expert may be chosen [tokens, experts]."""
    grouped = choice.view(len(choice), routing.groups, -1)
    counted = grouped.topk(2 if routing.group_score == "two_best" else 1, dim=-1).values.sum(-1)
    best = torch.zeros_like(counted, dtype=torch.bool).scatter(-1, _largest(counted, routing.top_groups), True)
    return best.unsqueeze(-1).expand(grouped.shape).flatten(-2)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Where the largest scores of each row stand; `topk` takes any of those that are equal."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def weighed(x: Tensor, weights: Tensor) -> Tensor:
    """Rows [n, hidden] times a weight each [n]."""
    return (x.float() * weights.unsqueeze(-1)).to(x.dtype)


def sum_experts(made: Tensor, weights: Tensor, residual: Tensor | None, shared: SharedExpert | None) -> Tensor:
    """`residual` plus the weighted sum of `made` [tokens, top_k, hidden] over a token's experts, in their order."""
    total = made.new_zeros(made[:, 0].shape, dtype=weights.dtype) if residual is None else residual.to(weights.dtype)
    for place in range(made.shape[1]):
        total = total + made[:, place] * weights[:, place, None]
    if shared is not None:
        own, gate = shared
        total = total + (own if gate is None else own * gate.to(weights.dtype).sigmoid())
    return total.to(made.dtype)
