"""Low-rank products of the native backend: rows padded to whole lanes, and tables that recorded calls know by address.

What the bytes mean is written in csrc/lora.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from ...errors import Unsupported
from ..lowrank import AdapterSlots, LowRank, LowRankTable
from .border import I64, check, checked

_LANES = 16
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ENTRY = np.dtype([("down", "<i8"), ("up", "<i8"), ("rank", "<i8"), ("kind", "<i8"), ("scale", "<f8")])


class NativeTable:
    """Entries of one linear map, in memory that stays where it is."""

    __slots__ = ("_held", "entries", "inputs", "outputs")

    def __init__(self, outputs: int, inputs: int, slots: int) -> None:
        self.outputs, self.inputs = outputs, inputs
        self.entries = np.zeros(slots, _ENTRY)
        self._held: list[LowRank | None] = [None] * slots  # what the addresses point to

    def put(self, slot: int, product: LowRank | None) -> None:
        if product is None:
            self.entries[slot] = np.zeros((), _ENTRY)
        else:
            kind = product.down.dtype
            check(kind in _KINDS, "down", f"must be floats, not {kind}")
            checked("down", product.down, (product.rank, _padded(self.inputs)), kind)
            checked("up", product.up, (product.rank, _padded(self.outputs)), kind)
            addresses = (product.down.data_ptr(), product.up.data_ptr())
            self.entries[slot] = (*addresses, product.rank, _KINDS[product.down.dtype], product.scale)
        self._held[slot] = product


def prepare(engine: Any, product: LowRank) -> LowRank:
    """A product as the kernels read it: both halves [rank, padded]."""
    if not hasattr(engine, "adapt"):
        raise Unsupported("the installed native kernels are older than this kvilt; reinstall it to build them again")
    down, up = product.down, product.up.T
    if down.dtype != up.dtype or down.dtype not in _KINDS:
        down, up = down.to(torch.float32), up.to(torch.float32)
    return LowRank(_whole_lanes(down), _whole_lanes(up), product.scale)


def adapt(
    engine: Any, x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots
) -> None:
    own = [table for table in tables if isinstance(table, NativeTable)]
    check(0 < len(own) == len(outs), "outs", "one output belongs to each table of this backend")
    x = checked("x", x.contiguous(), (len(x), own[0].inputs))
    for table, out in zip(own, outs, strict=True):
        check((table.inputs, len(table.entries)) == (x.shape[1], len(own[0].entries)), "tables", "must be of one input")
        checked("out", out, (len(x), table.outputs))
    checked("slots", adapter_slots.slots, (len(x),), I64)
    checked("scales", adapter_slots.scales, (len(x),))
    maps = ([one.entries.ctypes.data for one in own], [one.outputs for one in own], [out.data_ptr() for out in outs])
    rows = (x.data_ptr(), x.shape[0], x.shape[1])
    engine.adapt(*maps, *rows, adapter_slots.slots.data_ptr(), adapter_slots.scales.data_ptr(), len(own[0].entries))


def _padded(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _whole_lanes(half: Tensor) -> Tensor:
    """A copy, never a view of a file, with rows of whole lanes."""
    columns = half.shape[1]
    return F.pad(half, (0, _padded(columns) - columns)).clone(memory_format=torch.contiguous_format)
