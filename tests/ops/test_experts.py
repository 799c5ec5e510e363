"""Experts on every backend: what routers choose, and what the chosen experts make together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import Ops, Routed, Routing
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.reference import gated
from kvilt.ops.routing import route
from kvilt.quant.formats import FORMATS
from kvilt.quant.tensor import QuantTensor, Weight
from kvilt.quant.unpack import dequantize

EXPERTS, HIDDEN, INNER = 6, 48, 40
# Native kernels quantize activations to eight bits; the layout for GPUs keeps products of scales in float16.
PACKED = {"native": 2e-2, "triton": 2e-3, "reference": 1e-5}

ROUTINGS = {
    "softmax": Routing(2),
    "softmax, not normalized": Routing(3, normalized=False, scale=2.5),
    "chosen sigmoid": Routing(2, "chosen_sigmoid", normalized=False),
    "chosen softmax": Routing(3, "chosen_softmax", normalized=False),
    "sigmoid": Routing(2, "sigmoid", epsilon=1e-20, scale=1.5),
    "two of three groups": Routing(3, "sigmoid", groups=3, top_groups=2, group_score="two_best"),
    "one of two groups": Routing(2, groups=2, top_groups=1, normalized=False),
    "a floor": Routing(1, "sigmoid", floor=0.9),
    "all": Routing(6),
}


def truth_of(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[list[list[int]], Tensor]:
    """One token after the other, by its words."""
    chosen, weights = [], []
    for row in logits.double().tolist():
        peak = max(row)
        own = [2.718281828459045 ** (x - peak) for x in row]
        scores = {
            "softmax": [x / sum(own) for x in own],
            "sigmoid": [1 / (1 + 2.718281828459045**-x) for x in row],
            "chosen_softmax": row,
            "chosen_sigmoid": row,
        }[routing.scores]
        choice = scores if bias is None else [a + b for a, b in zip(scores, bias.tolist(), strict=True)]
        size, counted = len(row) // routing.groups, 2 if routing.group_score == "two_best" else 1
        groups = [sum(sorted(choice[g * size : (g + 1) * size])[-counted:]) for g in range(routing.groups)]
        best = sorted(range(routing.groups), key=lambda g: (-groups[g], g))[: routing.top_groups]
        allowed = [e for e in range(len(row)) if e // size in best]
        mine = sorted(sorted(allowed, key=lambda e: (-choice[e], e))[: routing.top_k])
        values = torch.tensor([scores[e] for e in mine], dtype=torch.float64)
        values = values.softmax(0) if routing.scores == "chosen_softmax" else values
        values = values.sigmoid() if routing.scores == "chosen_sigmoid" else values
        if routing.normalized:
            values = values / max(float(values.sum()) + routing.epsilon, routing.floor)
        chosen.append(mine)
        weights.append(values * routing.scale)
    return chosen, torch.stack(weights)


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_router_chooses_as_its_words_say(ops: Ops, near: Any, random_of: Any, case: str, biased: bool) -> None:
    routing, logits = ROUTINGS[case], random_of(9, EXPERTS)
    bias = random_of(EXPERTS, seed=1) if biased else None
    found = ops.route(logits.to(ops.dtype), routing, bias)
    chosen, weights = truth_of(logits, routing, bias)
    assert found.chosen.tolist() == chosen
    assert found.chosen.dtype == torch.int32
    near(found.weights, weights)
    factors = random_of(EXPERTS, seed=2)
    again = ops.route(logits.to(ops.dtype), routing, bias, factors)
    assert again.chosen.tolist() == chosen
    near(again.weights, weights * factors[found.chosen.long()])


@pytest.mark.parametrize("routing", [Routing(3), Routing(2, "sigmoid", groups=3, top_groups=1, group_score="two_best")])
def test_the_lower_number_wins_among_equals(ops: Ops, routing: Routing) -> None:
    found = ops.route(torch.zeros(33, EXPERTS), routing)
    assert found.chosen.tolist() == [list(range(routing.top_k))] * 33
    mixed = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]])
    assert ops.route(mixed, Routing(3)).chosen.tolist() == [[1, 2, 4]]


def test_logits_that_are_no_numbers_choose_experts_that_exist(ops: Ops) -> None:
    logits = torch.tensor([[float("nan")] * EXPERTS, [float("inf")] * EXPERTS, [0.0, float("nan"), 1, 2, 3, 4]])
    for routing in ROUTINGS.values():
        chosen = ops.route(logits, routing).chosen
        assert all(len(set(row)) == routing.top_k for row in chosen.tolist())
        assert bool(((chosen >= 0) & (chosen < EXPERTS)).all())


def matrices(random_of: Any, hidden: int, inner: int) -> list[list[Tensor]]:
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    return [[random_of(*shape, seed=3 * e + i) / 8 for i, shape in enumerate(shapes)] for e in range(EXPERTS)]


def biases_of(random_of: Any) -> list[list[Tensor | None]]:
    sizes = (INNER, INNER, HIDDEN)
    return [[random_of(size, seed=5 * e + i) for i, size in enumerate(sizes)] for e in range(EXPERTS)]


def expected(
    x: Tensor, routed: Routed, weights: list[list[Tensor]], biases: list[list[Tensor | None]], activation: Any
) -> Tensor:
    out = torch.zeros(len(x), weights[0][2].shape[0], dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(routed.chosen[token].tolist(), routed.weights[token].tolist(), strict=True):
            own = [w.double() for w in weights[expert]]
            adds = [0.0 if b is None else b.double() for b in biases[expert]]
            inner = gated(own[0] @ x[token].double() + adds[0], own[1] @ x[token].double() + adds[1], activation)
            out[token] += weight * (own[2] @ inner + adds[2])
    return out


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("tokens", [1, 2, 37])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_make_their_weighted_sum(
    ops: Ops, near: Any, random_of: Any, tokens: int, activation: Any, biased: bool
) -> None:
    weights = matrices(random_of, HIDDEN, INNER)
    biases = biases_of(random_of) if biased else [[None] * 3] * EXPERTS
    stack = ops.stack_experts(
        [tuple((ops.prepare(w), b) for w, b in zip(*maps, strict=True)) for maps in zip(weights, biases, strict=True)]
    )
    x, routed = random_of(tokens, HIDDEN), route(random_of(tokens, EXPERTS), Routing(3))
    truth = expected(x, routed, weights, biases, activation)
    near(ops.experts(x, routed, stack, activation), truth)
    residual, made, gate = random_of(tokens, HIDDEN, seed=7), random_of(tokens, HIDDEN, seed=8), random_of(tokens, 1)
    near(ops.experts(x, routed, stack, activation, residual.clone(), (made, None)), truth + residual + made)
    near(ops.experts(x, routed, stack, activation, None, (made, gate)), truth + made * gate.sigmoid())


@pytest.mark.parametrize("tokens", [1, 37])
def test_weights_of_inputs_multiply_what_experts_read(ops: Ops, near: Any, random_of: Any, tokens: int) -> None:
    weights, biases = matrices(random_of, HIDDEN, INNER), biases_of(random_of)
    stack = ops.stack_experts(
        [tuple((ops.prepare(w), b) for w, b in zip(*maps, strict=True)) for maps in zip(weights, biases, strict=True)]
    )
    x, routed = random_of(tokens, HIDDEN), route(random_of(tokens, EXPERTS), Routing(2, normalized=False))
    truth = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for place in range(2):
        one = Routed(routed.chosen[:, place : place + 1], torch.ones(tokens, 1))
        truth += expected(x * routed.weights[:, place : place + 1], one, weights, biases, "silu")
    residual, made = random_of(tokens, HIDDEN, seed=7), random_of(tokens, HIDDEN, seed=8)
    found = ops.experts(x, routed, stack, "silu", residual.clone(), (made, None), weigh_inputs=True)
    near(found, truth + residual + made)


def test_logits_choose_where_their_sigmoids_are_equal(ops: Ops) -> None:
    logits = torch.tensor([[40.0, 60.0, 50.0, 0.0]])
    assert ops.route(logits, Routing(1, "chosen_sigmoid", normalized=False)).chosen.tolist() == [[1]]


def packed(name: str, rows: int, columns: int, seed: int) -> QuantTensor:
    random, format_ = torch.Generator().manual_seed(seed), FORMATS[name]
    shape = (rows, columns // format_.block_elements, format_.block_bytes)
    blocks = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    if name == "MXFP4":
        blocks[..., 0] = 115 + blocks[..., 0] % 10
    for at in {"Q4_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}[name]:
        scales = torch.rand(*shape[:2], 1, generator=random) * 0.01 + 0.001
        blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    return QuantTensor.of_blocks(format_, (rows, columns), blocks.view(rows, -1))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4"])
@pytest.mark.parametrize("tokens", [1, pytest.param(3, marks=pytest.mark.slow), 11])
def test_packed_experts_are_their_weights(ops: Ops, random_of: Any, name: str, tokens: int) -> None:
    shapes = [(256, 256)] * 3
    weights: list[list[Weight]] = [[packed(name, *s, 3 * e + i) for i, s in enumerate(shapes)] for e in range(EXPERTS)]
    stack = ops.stack_experts([tuple((ops.prepare(w), None) for w in maps) for maps in weights])
    x, routed = random_of(tokens, 256), route(random_of(tokens, EXPERTS), Routing(2))
    plain = [[dequantize(w) for w in maps if isinstance(w, QuantTensor)] for maps in weights]
    truth = expected(x, routed, plain, [[None] * 3] * EXPERTS, "silu")
    residual, made, gate = random_of(tokens, 256, seed=7), random_of(tokens, 256, seed=8), random_of(tokens, 1)
    for _ in range(2):  # what a launch leaves behind is what the next one needs
        found = ops.experts(x, routed, stack, "silu").double()
        assert float((found - truth).norm() / truth.norm()) < PACKED[ops.name]
    whole = truth + residual + made * gate.sigmoid()
    found = ops.experts(x, routed, stack, "silu", residual.clone(), (made, gate)).double()
    assert float((found - whole).norm() / whole.norm()) < PACKED[ops.name]


def test_sums_of_what_experts_made_have_the_same_bits(ops: Ops, random_of: Any) -> None:
    weights = matrices(random_of, HIDDEN, INNER)
    stack = ops.stack_experts([tuple((ops.prepare(w), None) for w in maps) for maps in weights])
    x, routed = random_of(9, HIDDEN), route(random_of(9, EXPERTS), Routing(3))
    residual, shared = random_of(9, HIDDEN, seed=2), (random_of(9, HIDDEN, seed=3), random_of(9, 1))
    made = x.new_empty(9, 3, HIDDEN)
    for token in range(9):
        for place, index in enumerate(routed.chosen[token].tolist()):
            gate, up, down = stack.maps[index]
            made[token, place] = ops.linear(ops.gate_up(x[token : token + 1], gate, up, "silu"), *down)[0]
    together = ops.experts(x, routed, stack, "silu", residual.clone(), shared)
    apart = ops.sum_experts(made, routed, residual.clone(), shared)
    if ops.deterministic:
        assert torch.equal(together, apart)
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize("name", ["", "Q4_K", "MXFP4"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_has_its_bits_in_any_batch(random_of: Any, name: str, threads: int) -> None:
    """Alone, beside others, with any number of threads."""
    weights: list[list[Any]] = matrices(random_of, 256, 256)
    if name:
        weights = [[packed(name, 256, 256, 3 * e + i) for i in range(3)] for e in range(EXPERTS)]

    def run(ops: NativeOps, x: Tensor, logits: Tensor) -> Tensor:
        stack = ops.stack_experts([tuple((ops.prepare(w), None) for w in maps) for maps in weights])  # type: ignore[misc]
        return ops.experts(x, ops.route(logits, Routing(2)), stack, "silu", x.clone())

    x, logits = random_of(29, 256), random_of(29, EXPERTS)
    together = run(NativeOps(threads), x, logits).clone()
    one = NativeOps(1)
    for token in (0, 7, 28):
        assert torch.equal(run(one, x[token : token + 1], logits[token : token + 1])[0], together[token])
    assert torch.equal(run(one, x[3:19], logits[3:19]), together[3:19])


def test_an_expert_that_does_not_exist_is_refused(random_of: Any) -> None:
    ops = NativeOps(1)
    weights = matrices(random_of, HIDDEN, INNER)
    stack = ops.stack_experts([tuple((ops.prepare(w), None) for w in maps) for maps in weights])  # type: ignore[misc]
    routed = Routed(torch.tensor([[0, EXPERTS]], dtype=torch.int32), torch.ones(1, 2))
    with pytest.raises(IndexError, match="no such expert"):
        ops.experts(random_of(1, HIDDEN), routed, stack, "silu")
