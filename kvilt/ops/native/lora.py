"""Low-rank products of the native backend: rows padded to whole lanes, and tables that recorded calls know by address.

What the bytes mean is written in csrc/lora.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from ..lowrank import AdapterSlots, LowRank, LowRankTable
from .border import FLOATS, I64, TableAddress, check, checked, f32, floats, i64

if TYPE_CHECKING:
    from _kvilt_native import KernelRunner

_LANES = 16
_ENTRY = np.dtype([("down", "<i8"), ("up", "<i8"), ("rank", "<i8"), ("kind", "<i8"), ("scale", "<f8")])


class NativeTable:
    """Entries of one linear map, in memory that stays where it is."""

    __slots__ = ("_held", "entries", "inputs", "outputs")

    def __init__(self, outputs: int, inputs: int, slots: int) -> None:
        self.outputs, self.inputs = outputs, inputs
        self.entries = np.zeros(slots, _ENTRY)
        self._held: list[LowRank | None] = [None] * slots  # what the addresses point to

    @property
    def address(self) -> TableAddress:
        return TableAddress(self.entries.ctypes.data)

    def put(self, slot: int, product: LowRank | None) -> None:
        if product is None:
            self.entries[slot] = np.zeros((), _ENTRY)
        else:
            kind = product.down.dtype
            check(kind in FLOATS, "down", f"must be floats, not {kind}")
            checked("down", product.down, (product.rank, _padded(self.inputs)), kind)
            checked("up", product.up, (product.rank, _padded(self.outputs)), kind)
            addresses = (floats(product.down), floats(product.up))
            self.entries[slot] = (*addresses, product.rank, _kind(kind), product.scale)
        self._held[slot] = product


def _kind(dtype: torch.dtype) -> int:
    """The number of a dtype in an entry."""
    import _kvilt_native as module

    return module.WeightKind[str(dtype).removeprefix("torch.")].value


def prepare(product: LowRank) -> LowRank:
    """A product as the kernels read it: both halves [rank, padded]."""
    down, up = product.down, product.up.T
    if down.dtype != up.dtype or down.dtype not in FLOATS:
        down, up = down.to(torch.float32), up.to(torch.float32)
    return LowRank(_whole_lanes(down), _whole_lanes(up), product.scale)


def adapt(
    runner: KernelRunner, x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots
) -> None:
    own = [table for table in tables if isinstance(table, NativeTable)]
    check(0 < len(own) == len(outs), "outs", "one output belongs to each table of this backend")
    x = checked("x", x.contiguous(), (len(x), own[0].inputs))
    for table, out in zip(own, outs, strict=True):
        check((table.inputs, len(table.entries)) == (x.shape[1], len(own[0].entries)), "tables", "must be of one input")
        checked("out", out, (len(x), table.outputs))
    checked("slots", adapter_slots.slots, (len(x),), I64)
    checked("scales", adapter_slots.scales, (len(x),))
    outputs, addresses = [one.outputs for one in own], [one.address for one in own]
    to, slots = [f32(out) for out in outs], i64(adapter_slots.slots)
    count = len(own[0].entries)
    runner.add_lora(addresses, outputs, to, f32(x), x.shape[0], x.shape[1], slots, f32(adapter_slots.scales), count)


def _padded(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _whole_lanes(half: Tensor) -> Tensor:
    """A copy, never a view of a file, with rows of whole lanes."""
    columns = half.shape[1]
    return F.pad(half, (0, _padded(columns) - columns)).clone(memory_format=torch.contiguous_format)
