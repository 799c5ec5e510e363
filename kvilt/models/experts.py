"""A feed-forward of experts: a router chooses, for each token, the few blocks that compute it.

Each expert reads its weights once a step, for the tokens that chose it. A token's sum goes through its experts in
ascending order, so its result does not depend on what other tokens chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ..ops.contract import ExpertStack, Routed, SharedExpert
from ..ops.routing import weighed
from .layers import AllReduce, AnyNorm, DenseFeedForward, LayerContext, Linear, PlainFeedForward
from .spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class DenseBeside:
    """A dense block that reads what experts read. Both have norms of their own around them; the router has one."""

    block: DenseFeedForward
    out_norm: AnyNorm  # of what the dense block makes
    experts_norm: AnyNorm
    experts_out_norm: AnyNorm
    router_norm: AnyNorm
    factors: Tensor  # float32 [experts], of their weights


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum over a token's experts of weight * expert(x), plus what an expert makes that all tokens use."""

    spec: ExpertsSpec
    router: Linear
    experts: tuple[DenseFeedForward, ...]
    stack: ExpertStack  # the same, as the backend runs them together
    selection_bias: Tensor | None = None  # float32 [experts], moves the choice and not the weights
    shared: DenseFeedForward | None = None
    shared_gate: Linear | None = None  # to one logit
    beside: DenseBeside | None = None
    all_reduce: AllReduce | None = None  # set where this is one rank's part of each expert

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """The experts of `x`, which is normalized first, plus `residual`."""
        if self.beside is not None:
            return self._with_dense(self.beside, x, context, residual, norm)
        ops = context.ops
        maps = (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)
        x, (logits, *gates) = context.normed_linears(x, maps, norm)
        routed = ops.route(logits, self.spec.routing, self.selection_bias)
        shared = None if self.shared is None else (self.shared(x, context), gates[0] if gates else None)
        return self._sum(x, routed, context, residual, shared)

    def _with_dense(
        self, beside: DenseBeside, x: Tensor, context: LayerContext, residual: Tensor | None, norm: AnyNorm | None
    ) -> Tensor:
        """What the dense block makes of `x`, normalized by `norm`, and what experts make of it by theirs."""
        ops = context.ops
        dense = beside.out_norm(beside.block(x, context, None, norm), ops)
        _, (logits,) = context.normed_linears(x, (self.router,), beside.router_norm)
        routed = ops.route(logits, self.spec.routing, self.selection_bias, beside.factors)
        made = self._sum(beside.experts_norm(x, ops), routed, context, None, None)
        both = ops.add(dense, beside.experts_out_norm(made, ops))
        return both if residual is None else ops.add(residual, both)

    def _sum(
        self,
        x: Tensor,
        routed: Routed,
        context: LayerContext,
        residual: Tensor | None,
        shared: SharedExpert | None,
    ) -> Tensor:
        """The sum over each token's experts; ranks that have parts of them add the residual once, to all parts."""
        if self.all_reduce is None:
            return self._part(x, routed, context, residual, shared)
        whole = self.all_reduce(self._part(x, routed, context, None, shared))
        return whole if residual is None else context.ops.add(residual, whole)

    def _part(
        self,
        x: Tensor,
        routed: Routed,
        context: LayerContext,
        residual: Tensor | None,
        shared: SharedExpert | None,
    ) -> Tensor:
        ops, weigh_inputs = context.ops, self.spec.router.weigh_inputs
        if self._adapted(context):
            made = self._one_by_one(x, routed, context)
            return ops.sum_experts(made, routed.unweighted() if weigh_inputs else routed, residual, shared)
        return ops.experts(x, routed, self.stack, self.spec.gate_activation, residual, shared, weigh_inputs)

    def _adapted(self, context: LayerContext) -> bool:
        """Whether some row of the step changes a map of an expert."""
        adapters = context.step_adapters
        return adapters is not None and any(
            adapters.touches(one.gate.name, one.up.name, one.down.name) for one in self.experts
        )

    def _one_by_one(self, x: Tensor, routed: Routed, context: LayerContext) -> Tensor:
        """What each token's experts make, with their adapters [tokens, top_k, hidden]."""
        made = x.new_empty((*routed.chosen.shape, x.shape[1]))
        for index in sorted(set(routed.chosen.flatten().tolist())):
            tokens, place = (routed.chosen == index).nonzero(as_tuple=True)
            read = x[tokens]
            if self.spec.router.weigh_inputs:
                read = weighed(read, routed.weights[tokens, place])
            made[tokens, place] = self.experts[index](read, context.of(tokens))
        return made


FeedForward: TypeAlias = DenseFeedForward | PlainFeedForward | Experts
