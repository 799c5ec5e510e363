"""Which experts tokens go to, chosen on the device in one launch: a program for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Routed, Routing
from ..routing import RouterScores
from .overlap import await_inputs, launch_next, overlap

_SCORES: dict[RouterScores, int] = {"softmax": 0, "sigmoid": 1, "chosen_softmax": 2, "chosen_sigmoid": 3}


def route(logits: Tensor, routing: Routing, bias: Tensor | None, factors: Tensor | None = None) -> Routed:
    """As `ops.routing.route`."""
    tokens, experts = logits.shape
    chosen = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    _route[(tokens,)](
        logits, chosen if bias is None else bias, chosen if factors is None else factors, chosen, weights,
        logits.stride(0), routing.epsilon, routing.floor, routing.scale, FACTORS=factors is not None, EXPERTS=experts,
        BLOCK=triton.next_power_of_2(experts), TOP_K=routing.top_k,
        SCORES=_SCORES[routing.scores], BIAS=bias is not None, NORMALIZED=routing.normalized, GROUPS=routing.groups,
        GROUP_BLOCK=triton.next_power_of_2(routing.groups), TOP_GROUPS=routing.top_groups,
        TWO_BEST=routing.group_score == "two_best", num_warps=1, **overlap(logits),
    )  # fmt: skip
    return Routed(chosen, weights)


@triton.jit
def _ranked(number):
    """Whole numbers that order like floats, all of them above the least one."""
    bits = tl.where(number == 0.0, 0.0, number).to(tl.int32, bitcast=True)  # both zeros are one
    return tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -0x7FFFFFFF)


@triton.jit
def _largest(ranked, place, PLACES: tl.constexpr, COUNT: tl.constexpr):
    """Which `COUNT` of the numbers are the largest; among equal ones those with the lowest places."""
    taken = place < 0
    for _ in tl.static_range(COUNT):
        left = tl.where(taken, -0x7FFFFFFF - 1, ranked)
        first = tl.min(tl.where(left == tl.max(left, 0), place, PLACES), 0)
        taken = taken | (place == first)
    return taken


@triton.jit
def _in_best_groups(
    choice, e,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr,
):  # fmt: skip
    """Whether each expert may be chosen."""
    group, lowest = tl.arange(0, GROUP_BLOCK), -float("inf")
    own = (e // (EXPERTS // GROUPS))[:, None] == group[None, :]  # [experts, groups]
    numbers = tl.where(own, choice[:, None], lowest)
    counted = tl.max(numbers, 0)
    if TWO_BEST:
        first = tl.min(tl.where(own & (numbers == counted[None, :]), e[:, None], EXPERTS), 0)
        counted += tl.max(tl.where(e[:, None] == first[None, :], lowest, numbers), 0)
    counted = tl.where(group < GROUPS, counted, lowest)
    best = _largest(_ranked(counted), group, GROUP_BLOCK, TOP_GROUPS)
    return tl.max((own & best[None, :]).to(tl.int32), 1) > 0


@triton.jit
def _route(
    logits, bias, factors, chosen, weights, stride, epsilon, floor, scale,
    FACTORS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, SCORES: tl.constexpr,
    BIAS: tl.constexpr, NORMALIZED: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TWO_BEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    token, e = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = e < EXPERTS
    own = tl.load(logits + token * stride + e, mask=there, other=-float("inf")).to(tl.float32)
    scores = own
    if SCORES == 0:
        powers = tl.exp(own - tl.max(own, 0))
        scores = powers / tl.sum(powers, 0)
    if SCORES == 1:
        scores = tl.sigmoid(own)
    choice = scores
    if BIAS:
        choice += tl.load(bias + e, mask=there, other=0.0)
    if GROUPS > 1:
        allowed = _in_best_groups(choice, e, EXPERTS, GROUPS, GROUP_BLOCK, TOP_GROUPS, TWO_BEST)
        choice = tl.where(allowed, choice, -float("inf"))
    ranked = tl.where(there, _ranked(choice), -0x7FFFFFFF - 1)
    taken = _largest(ranked, e, BLOCK, TOP_K)
    if SCORES == 2:
        powers = tl.exp(scores - tl.max(tl.where(taken, scores, -float("inf")), 0))
        scores = powers / tl.sum(tl.where(taken, powers, 0.0), 0)
    if SCORES == 3:
        scores = tl.sigmoid(scores)
    if NORMALIZED:
        scores = scores / tl.maximum(tl.sum(tl.where(taken, scores, 0.0), 0) + epsilon, floor)
    if FACTORS:
        scores = scores * tl.load(factors + e, mask=there, other=0.0)
    place = token * TOP_K + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(chosen + place, e, mask=taken)
    tl.store(weights + place, scores * scale, mask=taken)
