"""Norms, rotations, gates, embeddings and products against their definitions, number by number in float64."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from kvilt.errors import Unsupported
from kvilt.ops.contract import Ops, Rotation, TemperatureScaling
from kvilt.ops.select import BACKENDS, CPU, select
from kvilt.quant.formats import FORMATS
from kvilt.quant.tensor import QuantTensor


def q8_0(values: Tensor) -> tuple[QuantTensor, Tensor]:
    """Packed Q8_0 blocks by the format's definition (float16 scale, 32 signed bytes), and what they stand for."""
    rows, columns = values.shape
    blocks = values.view(rows, columns // 32, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    whole = torch.round(blocks / scales.float()).clamp(-127, 127).to(torch.int8)
    packed = torch.cat((scales.view(torch.uint8), whole.view(torch.uint8)), dim=-1)
    truth = (whole.double() * scales.double()).view(rows, columns)
    return QuantTensor.of_blocks(FORMATS["Q8_0"], (rows, columns), packed.view(rows, -1)), truth


# Tables and choice.


def test_a_backend_is_chosen_by_name_and_auto_takes_the_first() -> None:
    assert select("auto").name == next(iter(BACKENDS))
    here = [name for name in BACKENDS if name != "triton"]
    assert [select(name).name for name in here] == here
    with pytest.raises(Unsupported, match="run on CUDA devices, not on cpu"):
        select("triton")
    with pytest.raises(Unsupported, match="there is no backend 'abacus'"):
        select("abacus")


def test_numerics_name_the_backend(ops: Ops, backend: str) -> None:
    assert ops.numerics.startswith(backend)
    assert backend == "triton" or ops.numerics == BACKENDS[backend](CPU, 1).numerics


# Norms and gates.


@pytest.mark.parametrize(("shape", "eps"), [((3, 8), 1e-5), ((2, 4, 6), 1e-6), ((1, 1), 1e-5), ((5, 576), 1e-5)])
def test_rms_norm(ops: Ops, near: Any, random_of: Any, shape: tuple[int, ...], eps: float) -> None:
    x, weight = random_of(*shape) * 3, random_of(shape[-1])
    truth = torch.empty(shape, dtype=torch.float64)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in shape[:-1])).view(-1, len(shape) - 1).tolist():
        row = [float(v) for v in x[tuple(place)]]
        root = math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
        truth[tuple(place)] = torch.tensor([v / root * float(w) for v, w in zip(row, weight, strict=True)]).double()
    near(ops.rms_norm(x, weight, eps), truth)


def test_rms_norm_of_zeros_is_zeros(ops: Ops) -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 16), (4, 33), (2, 300)])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(ops: Ops, near: Any, random_of: Any, shape: tuple[int, ...], biased: bool) -> None:
    """Also of numbers far from 0: the mean is taken away before the variance is taken."""
    x, weight = random_of(*shape) + 3, random_of(shape[-1], seed=1)
    bias = random_of(shape[-1], seed=2) if biased else None
    centred = x.double() - x.double().mean(-1, keepdim=True)
    truth = centred * (centred.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    near(ops.layer_norm(x, weight, bias, 1e-3), truth if bias is None else truth + bias.double())


def test_layer_norm_of_a_row_is_the_same_among_others(ops: Ops, random_of: Any) -> None:
    x, weight, bias = random_of(40, 70), random_of(70, seed=1), random_of(70, seed=2)
    together = ops.layer_norm(x, weight, bias, 1e-5).clone()
    for row in (0, 7, 39):
        assert torch.equal(ops.layer_norm(x[row : row + 1].clone(), weight, bias, 1e-5)[0], together[row])


@pytest.mark.parametrize("offset", [0, 1])
def test_queries_are_scaled_by_position(ops: Ops, near: Any, random_of: Any, offset: int) -> None:
    query, positions = random_of(7, 3, 5), torch.tensor([0, 6, 7, 8, 13, 14, 1000])
    factors = [1 + 0.3 * math.log(1 + (p + offset) // 7) for p in positions.tolist()]
    truth = query.double() * torch.tensor(factors, dtype=torch.float64).view(-1, 1, 1)
    near(ops.scale_queries(query, positions, TemperatureScaling(0.3, 7, offset)), truth)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "tanh": math.tanh,
    "relu2": lambda x: max(x, 0.0) ** 2,
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_is_activation_of_one_product_times_the_other(
    ops: Ops, near: Any, random_of: Any, activation: Any
) -> None:
    x, gate, up = random_of(9, 20), random_of(33, 20, seed=1), random_of(33, 20, seed=2)
    bias = random_of(33, seed=3)
    gates, ups = x.double() @ gate.double().T + bias.double(), x.double() @ up.double().T
    each = [ACTIVATIONS[activation](float(g)) * float(u) for g, u in zip(gates.flatten(), ups.flatten(), strict=True)]
    found = ops.gate_up(x, (ops.prepare(gate), bias), (ops.prepare(up), None), activation)
    near(found, torch.tensor(each, dtype=torch.float64).view(9, 33))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (9, 33), (2, 5000)])
def test_an_activation_alone(ops: Ops, near: Any, random_of: Any, activation: Any, shape: tuple[int, int]) -> None:
    x = random_of(*shape)
    each = [ACTIVATIONS[activation](value) for value in x.flatten().tolist()]
    near(ops.activate(x, activation), torch.tensor(each, dtype=torch.float64).view(*shape))


@pytest.mark.parametrize("count", [1, 17, 5000])
def test_a_scaled_sum(ops: Ops, near: Any, random_of: Any, count: int) -> None:
    x, y = random_of(2, count), random_of(2, count, seed=1)
    near(ops.add(x, y, 0.3), x.double() + 0.3 * y.double())


def test_add_and_a_product_onto_something(ops: Ops, near: Any, random_of: Any) -> None:
    x, y = random_of(5, 3, 7), random_of(5, 3, 7, seed=1)
    assert torch.equal(ops.add(x, y), x + y)
    rows, weight, residual = random_of(3, 8), random_of(20, 8, seed=1), random_of(3, 20, seed=2)
    truth = residual.double() + rows.double() @ weight.double().T
    near(ops.linear(rows, ops.prepare(weight), None, residual), truth)  # may use the memory of the residual


def test_a_soft_cap_bends_what_is_large(ops: Ops, near: Any, random_of: Any) -> None:
    x = random_of(3, 50) * 40
    near(ops.soft_cap(x.clone(), 30.0), torch.tanh(x.double() / 30) * 30)


# Rotation.


def turned(x: Tensor, angles: Tensor, pairing: str) -> Tensor:
    """Each pair as a complex number times exp(i * angle); dims past the pairs pass through."""
    pairs = angles.shape[-1]
    truth = x.double().clone()
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            for pair in range(pairs):
                a, b = (pair, pair + pairs) if pairing == "half" else (2 * pair, 2 * pair + 1)
                number = complex(x[token, head, a], x[token, head, b])
                angle = float(angles[token, pair])
                number *= complex(math.cos(angle), math.sin(angle))
                truth[token, head, a], truth[token, head, b] = number.real, number.imag
    return truth


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("dim", "pairs"), [(8, 4), (8, 3), (8, 1), (6, 3)])
def test_rotate(ops: Ops, near: Any, random_of: Any, pairing: Any, dim: int, pairs: int) -> None:
    x = random_of(5, 3, dim)
    angles = torch.outer(torch.tensor([0.0, 1.0, 2.0, 7.0, 1000.0]).double(), 10000.0 ** -(torch.arange(pairs) / pairs))
    rotation = Rotation(angles.cos().float(), angles.sin().float(), pairing)
    out = ops.rotate(x, rotation)
    near(out, turned(x, angles, pairing))
    assert torch.equal(out[0], x[0])  # position 0 turns nothing
    assert torch.equal(out[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotation_makes_products_depend_on_distance_alone(ops: Ops, near: Any, random_of: Any, pairing: Any) -> None:
    q, k = random_of(1, 1, 8).expand(2, 1, 8), random_of(1, 1, 8, seed=1).expand(2, 1, 8)
    base = torch.tensor([1.0, 0.1, 0.01, 0.001])
    at = lambda positions: torch.outer(torch.tensor(positions), base)  # noqa: E731
    here, there = (Rotation(a.cos(), a.sin(), pairing) for a in (at([5.0, 25.0]), at([2.0, 22.0])))
    near_and_far = (ops.rotate(q, here) * ops.rotate(k, there)).sum(-1)
    assert abs(float(near_and_far[0] - near_and_far[1])) < 1e-4


# Weights.


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "as loaded"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_embed_picks_rows(ops: Ops, near: Any, random_of: Any, packed: bool, prepared: bool) -> None:
    table, truth = q8_0(random_of(7, 64)) if packed else (random_of(7, 64), random_of(7, 64).double())
    ids = torch.tensor([6, 0, 3, 3])
    near(ops.embed(ops.prepare(table) if prepared else table, ids), truth[ids])


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "as loaded"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_is_a_product_plus_a_bias(
    ops: Ops, near: Any, near_packed: Any, random_of: Any, packed: bool, prepared: bool, biased: bool
) -> None:
    weight, truth = q8_0(random_of(5, 64)) if packed else (random_of(5, 64), random_of(5, 64).double())
    x, bias = random_of(3, 64, seed=2), random_of(5) if biased else None
    expected = torch.tensor(
        [
            [math.fsum(float(a) * float(b) for a, b in zip(row, column, strict=True)) for column in truth]
            for row in x.double()
        ],
        dtype=torch.float64,
    )
    if bias is not None:
        expected += bias.double()
    (near_packed if packed else near)(ops.linear(x, ops.prepare(weight) if prepared else weight, bias), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_half_precision_weight_is_prepared_without_loss(
    ops: Ops, near: Any, random_of: Any, dtype: torch.dtype
) -> None:
    table = random_of(7, 32).to(dtype)
    near(ops.embed(ops.prepare(table), torch.arange(7)), table.double())


def test_a_row_of_a_batch_equals_the_row_alone(ops: Ops, near: Any, random_of: Any) -> None:
    x, weight = random_of(9, 64), random_of(5, 64)
    together = ops.linear(x, weight)
    for row in range(9):
        near(ops.linear(x[row : row + 1], weight), together[row : row + 1].double())


# Maps of single heads.


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("biased", [(False, False), (True, True), (True, False)], ids=str)
def test_a_norm_and_maps_of_what_it_makes(
    ops: Ops, near: Any, random_of: Any, tokens: int, biased: tuple[bool, bool]
) -> None:
    x, gain, eps = random_of(tokens, 70), random_of(70, seed=1), 1e-5
    weights = [random_of(outputs, 70, seed=2) for outputs in (9, 33)]
    biases = [random_of(len(w), seed=3) if own else None for w, own in zip(weights, biased, strict=True)]
    maps = [(ops.prepare(w.clone()), b) for w, b in zip(weights, biases, strict=True)]
    normed, outs = ops.norm_linears(x, maps, (gain, eps))
    wide = x.double()
    truth = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double()
    near(normed, truth)
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        near(out, truth @ weight.double().T + (0 if bias is None else bias.double()))


@pytest.mark.parametrize("first", [1, 5])
def test_maps_stay_where_the_first_step_finds_them(ops: Ops, random_of: Any, first: int) -> None:
    """A captured step knows memory by its address, whatever number of rows other steps have."""
    maps = [(ops.prepare(random_of(outputs, 70, seed=2)), random_of(outputs, seed=3)) for outputs in (9, 33)]
    norm = (random_of(70), 1e-5)

    def places() -> list[int]:
        return [one.data_ptr() for one in chain.from_iterable(maps) if isinstance(one, Tensor)]

    ops.linears(random_of(first, 70), maps, norm)
    before = places()
    for rows in (1, 5):
        ops.linears(random_of(rows, 70), maps, norm)
        ops.norm_linears(random_of(rows, 70), maps, norm)
    assert places() == before and len(before) >= len(maps)


@pytest.mark.parametrize("sizes", [((4, 16), (2, 16)), ((3, 12), (3, 12)), ((2, 8), (2, 16))], ids=str)
def test_norms_of_several_tensors(ops: Ops, near: Any, random_of: Any, sizes: tuple[tuple[int, int], ...]) -> None:
    whole = random_of(5, 200)  # their rows stand apart
    parts = [
        part.view(5, *size)
        for part, size in zip(
            whole.split([a * b for a, b in sizes] + [200 - sum(a * b for a, b in sizes)], dim=1), sizes, strict=False
        )
    ]
    gains = [random_of(dim, seed=7 + i) for i, (_, dim) in enumerate(sizes)]
    for found, part, gain in zip(ops.rms_norms(parts, [(gain, 1e-6) for gain in gains]), parts, gains, strict=True):
        wide = part.double()
        near(found, wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain.double())


@pytest.mark.parametrize(("tokens", "moved"), [(1, 0), (1, 6), (9, 3), (40, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_head_goes_through_its_own_matrix(
    ops: Ops, near: Any, random_of: Any, tokens: int, moved: int, dtype: torch.dtype
) -> None:
    x, weight = random_of(tokens, 3, 70 + moved), random_of(3, 37, 70, seed=1).to(dtype)
    found = ops.per_head_linear(x, ops.prepare_per_head(weight), moved)
    truth = torch.einsum("thi,hoi->tho", x[..., :70].double(), weight.double())
    assert torch.equal(found[..., :moved], x[..., 70:])
    near(found[..., moved:], truth)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)  # the same numbers, column by column in memory
    assert torch.equal(ops.per_head_linear(x, ops.prepare_per_head(turned), moved), found)


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_a_head_has_its_bits_beside_any_tokens(ops: Ops, backend: str, random_of: Any, tokens: int) -> None:
    if backend == "reference":
        return  # torch sums in an order that depends on shapes
    x, weight = random_of(40, 3, 34), ops.prepare_per_head(random_of(3, 21, 30, seed=1))
    whole = ops.per_head_linear(x, weight, 4).clone()
    assert torch.equal(ops.per_head_linear(x[7 : 7 + tokens].clone(), weight, 4), whole[7 : 7 + tokens])
