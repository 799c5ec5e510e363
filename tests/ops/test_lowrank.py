"""Gathered low-rank products of every backend against float64, and to the bit whatever stands beside a row."""

from __future__ import annotations

from collections.abc import Callable

import _kvilt_native
import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import Activation, Ops
from kvilt.ops.lowrank import AdapterSlots, LowRank, LowRankTable
from kvilt.ops.native.backend import NativeOps

INPUTS, OUTPUTS = (40, 75, 64), (24, 16, 300)
RANKS = (1, 3, 4, 16, 37)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def products(inputs: int, outputs: int) -> list[LowRank]:
    """One of every rank, in every dtype in turn."""
    random = torch.Generator().manual_seed(inputs * outputs)
    made = []
    for n, rank in enumerate(RANKS):
        down, up = torch.randn(rank, inputs, generator=random), torch.randn(outputs, rank, generator=random)
        dtype = DTYPES[n % 3]
        made.append(LowRank(down.to(dtype) / 4, up.to(dtype) / 4, 0.5 + n))
    return made


def table_of(ops: Ops, inputs: int, outputs: int) -> LowRankTable:
    table = ops.new_table(outputs, inputs, 8)
    for slot, product in enumerate(products(inputs, outputs)):
        table.put(slot, ops.prepare_low_rank(product))
    return table


def truth(x: Tensor, out: Tensor, slots: Tensor, scales: Tensor) -> Tensor:
    wanted, made = out.double(), products(x.shape[1], out.shape[1])
    for row, (slot, scale) in enumerate(zip(slots.tolist(), scales.tolist(), strict=True)):
        if 0 <= slot < len(made):
            one = made[slot]
            wanted[row] += one.scale * scale * (one.up.double() @ (one.down.double() @ x[row].double()))
    return wanted


def rows_of(count: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, outputs to add to, slots and scales: base rows, an empty slot, and adapters in no order."""
    random = torch.Generator().manual_seed(count)
    x, out = torch.randn(count, inputs, generator=random), torch.randn(count, outputs, generator=random)
    slots = torch.randint(-1, len(RANKS) + 1, (count,), generator=random)
    return x, out, slots, torch.rand(count, generator=random) * 2 - 0.5


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_every_row_gets_its_own_product(ops: Ops, near: Callable[..., None], inputs: int, outputs: int) -> None:
    x, out, slots, scales = rows_of(70, inputs, outputs)
    found = out.clone()
    ops.adapt(x, [table_of(ops, inputs, outputs)], [found], AdapterSlots(slots, scales))
    near(found, truth(x, out, slots, scales))
    untouched = (slots < 0) | (slots == len(RANKS))
    assert torch.equal(found[untouched], out[untouched])


def test_several_maps_of_one_input_are_the_same_as_each_alone(ops: Ops) -> None:
    x, _, slots, scales = rows_of(33, 40, 24)
    outs = [torch.randn(33, outputs) for outputs in OUTPUTS]
    tables = [table_of(ops, 40, outputs) for outputs in OUTPUTS]
    together, apart = [out.clone() for out in outs], [out.clone() for out in outs]
    ops.adapt(x, tables, together, AdapterSlots(slots, scales))
    for table, out in zip(tables, apart, strict=True):
        ops.adapt(x, [table], [out], AdapterSlots(slots, scales))
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@pytest.mark.parametrize("isa", ["auto", *_kvilt_native.available_isas()])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_alone_and_in_any_company(isa: str, threads: int) -> None:
    ops = NativeOps(threads, isa)
    for inputs, outputs in zip(INPUTS, OUTPUTS, strict=True):
        x, out, slots, scales = rows_of(53, inputs, outputs)
        table = table_of(ops, inputs, outputs)
        together = out.clone()
        ops.adapt(x, [table], [together], AdapterSlots(slots, scales))
        for row in range(len(x)):
            alone = out[row : row + 1].clone()
            ops.adapt(x[row : row + 1], [table], [alone], AdapterSlots(slots[row : row + 1], scales[row : row + 1]))
            assert torch.equal(alone[0], together[row])
        back = out.flip(0).contiguous()
        ops.adapt(x.flip(0), [table], [back], AdapterSlots(slots.flip(0).contiguous(), scales.flip(0).contiguous()))
        assert torch.equal(back.flip(0), together)


def test_a_slot_that_is_emptied_adds_nothing(ops: Ops) -> None:
    x, out, _, _ = rows_of(4, 40, 24)
    table, found = table_of(ops, 40, 24), out.clone()
    table.put(2, None)
    ops.adapt(x, [table], [found], AdapterSlots(torch.full((4,), 2), torch.ones(4)))
    assert torch.equal(found, out)


def test_a_slot_that_does_not_exist_is_an_error_in_native_code() -> None:
    ops = NativeOps(1)
    x, out, _, _ = rows_of(2, 40, 24)
    for slot in (8, -2, 1 << 62):
        with pytest.raises(IndexError):
            ops.adapt(x, [table_of(ops, 40, 24)], [out], AdapterSlots(torch.full((2,), slot), torch.ones(2)))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gate_opens_to_the_same_bits_fused_and_not(ops: Ops, activation: Activation) -> None:
    """So a row without an adapter does not notice that another row's adapter took the two apart."""
    x = torch.randn(9, 40)
    gate, up = (ops.prepare(torch.randn(50, 40) / 6) for _ in range(2))
    bias = torch.randn(50)
    fused = ops.gate_up(x, (gate, bias), (up, None), activation)
    assert torch.equal(ops.act_mul(*ops.linears(x, [(gate, bias), (up, None)]), activation), fused)
