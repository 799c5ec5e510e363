"""Experts by the native kernels: routing, the products of all chosen experts in one call, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import Unsupported
from ..contract import ExpertMaps, ExpertStack, PackedWeight, Routed, Routing, SharedExpert
from .border import I32, F32Address, I32Address, check, check_dims, checked, f32, i32
from .memory import Buffers

if TYPE_CHECKING:
    from _kvilt_native import Activation, KernelRunner, Weight


def stack(experts: Sequence[ExpertMaps]) -> ExpertStack:
    """Handles of all maps, beside each other; their memory stays where it is."""
    import _kvilt_native as module

    if not hasattr(module, "ExpertStack"):
        raise Unsupported("the installed native kernels are older than this kvilt; reinstall it to build them again")
    weights: list[list[Weight]] = [[], [], []]  # gates, ups and downs
    biases: list[list[F32Address]] = [[], [], []]
    for maps in experts:
        for place, (weight, bias) in enumerate(maps):
            assert isinstance(weight, PackedWeight), "a weight of another backend"
            if bias is not None:
                checked("bias", bias, (weight.shape[0],))
            weights[place].append(weight.handle)
            biases[place].append(f32(bias))
    (gates, ups, downs), (of_gates, of_ups, of_downs) = weights, biases
    handle = module.ExpertStack(gates, ups, downs, of_gates, of_ups, of_downs)
    return ExpertStack(tuple(experts), handle, asks_the_host=False)


def route(
    runner: KernelRunner,
    buffers: Buffers,
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> Routed:
    """The experts that logits [tokens, experts] choose."""
    import _kvilt_native as module

    check_dims("logits", logits, 2)
    tokens, experts = logits.shape
    logits = checked("logits", logits.contiguous(), logits.shape)
    for name, own in (("bias", bias), ("factors", factors)):
        if own is not None:
            checked(name, own, (experts,))
    chosen = buffers.empty(tokens, routing.top_k).view(torch.int32)
    weights = buffers.empty(tokens, routing.top_k)
    runner.route(
        f32(logits), f32(bias), f32(factors), tokens, experts, module.RouterScores[routing.scores], routing.top_k,
        routing.normalized, routing.epsilon, routing.floor, routing.scale, routing.groups, routing.top_groups,
        routing.group_score == "two_best", i32(chosen), f32(weights),
    )  # fmt: skip
    return Routed(chosen, weights)


def experts(
    runner: KernelRunner,
    buffers: Buffers,
    x: Tensor,
    routed: Routed,
    all_experts: ExpertStack,
    activation: Activation,
    residual: Tensor | None,
    shared: SharedExpert | None,
    weigh_inputs: bool,
) -> Tensor:
    """The weighted sums over each token's experts."""
    check_dims("x", x, 2)
    gate = all_experts.maps[0][0][0]
    x = checked("x", x.contiguous(), (x.shape[0], gate.shape[1]))
    chosen, weights, top_k = _routed(routed, len(x))
    out = buffers.empty(*x.shape)
    added = _added(x.shape, residual, shared)
    how = (chosen, weights, top_k, activation, weigh_inputs)
    runner.experts(all_experts.handle, f32(x), len(x), *how, *added, f32(out))
    return out


def sum_experts(
    runner: KernelRunner,
    buffers: Buffers,
    made: Tensor,
    routed: Routed,
    residual: Tensor | None,
    shared: SharedExpert | None,
) -> Tensor:
    """The sums of results [tokens, top_k, hidden] that are there already."""
    check_dims("made", made, 3)
    tokens, top_k, hidden = made.shape
    made = checked("made", made.contiguous(), made.shape)
    check(routed.chosen.shape == (tokens, top_k), "made", "must have a row for each chosen expert")
    _, weights, _ = _routed(routed, tokens)
    out = buffers.empty(tokens, hidden)
    runner.sum_experts(f32(made), weights, tokens, top_k, hidden, *_added(out.shape, residual, shared), f32(out))
    return out


def _routed(routed: Routed, tokens: int) -> tuple[I32Address, F32Address, int]:
    check_dims("chosen", routed.chosen, 2)
    shape = (tokens, routed.chosen.shape[1])
    checked("chosen", routed.chosen, shape, I32)
    checked("weights", routed.weights, shape)
    return i32(routed.chosen), f32(routed.weights), shape[1]


def _added(
    shape: tuple[int, ...], residual: Tensor | None, shared: SharedExpert | None
) -> tuple[F32Address, F32Address, F32Address]:
    """What is added to the experts' sum: the residual, the shared expert, and the logit of its weight."""
    made, gate = (None, None) if shared is None else shared
    for name, tensor in (("residual", residual), ("shared", made)):
        if tensor is not None:
            checked(name, tensor, shape)
    if gate is not None:
        checked("shared gate", gate, (shape[0], 1))
    return f32(residual), f32(made), f32(gate)
