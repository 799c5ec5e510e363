"""How packed weights lie on the device: rows of codes, then their scales, so that kernels load words as they need them.

A word of 16 bits holds a code of each of several groups: code i of word c is column `i * group + c` of a chunk, and a
chunk has `group` words. So one load gives tensor cores several tiles, of one scale a row each. Codes of six bits have
two such blocks of words for their lower four bits, and one for the upper two of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...quant.groups import GROUPED_FORMATS, Groups, split_rows
from ...quant.tensor import QuantTensor
from ..contract import PackedWeight

PADDED = 256  # columns: rows are filled up to a multiple of it, with scales of zero
ALIGNED_BYTES = 128  # rows begin where lines of the cache do
SLAB = 1 << 26  # codes that are rearranged at a time


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    """The layout of one packed weight."""

    bits: int
    group: int
    offset: int
    minimums: bool
    columns: int

    @property
    def slots(self) -> int:
        """Groups of a chunk."""
        return 8 if self.bits == 6 else 16 // self.bits

    @property
    def padded(self) -> int:
        return -(-self.columns // PADDED) * PADDED

    @property
    def code_bytes(self) -> int:
        """Of a row; scales follow."""
        return self.padded * self.bits // 8

    @property
    def row_bytes(self) -> int:
        scale_bytes = self.padded // self.group * (4 if self.minimums else 2)
        return -(-(self.code_bytes + scale_bytes) // ALIGNED_BYTES) * ALIGNED_BYTES


def pack(weight: QuantTensor, device: torch.device) -> PackedWeight:
    """Bring a weight to the device in this layout, a slab of rows at a time."""
    rows, columns = weight.shape
    one = GROUPED_FORMATS[weight.format.name]
    layout = GroupedLayout(one.bits, one.group, one.offset, one.minimums, columns)
    data = torch.zeros((rows, layout.row_bytes), dtype=torch.uint8, device=device)
    step = max(1, SLAB // columns)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        _put(layout, data[start:stop], split_rows(weight, start, stop, device))
    return PackedWeight(weight.format.name, (rows, columns), data, layout)


def _put(layout: GroupedLayout, data: Tensor, groups: Groups) -> None:
    codes = torch.zeros((len(data), layout.padded), dtype=torch.int32, device=data.device)
    codes[:, : layout.columns] = groups.codes
    slots = codes.view(len(data), -1, layout.slots, layout.group)
    if layout.bits == 6:
        parts = [_words(slots[:, :, :4] & 15, 4), _words(slots[:, :, 4:] & 15, 4), _words(slots >> 4, 2)]
        words = torch.cat(parts, dim=-1)
    else:
        words = _words(slots, layout.bits)
    # Words of 16 bits out of 32: the first half of each, as bytes are ordered on every machine that has these kernels.
    data[:, : layout.code_bytes] = words.flatten(1).view(torch.int16)[:, ::2].contiguous().view(torch.uint8)
    pairs = [groups.scales] if groups.minimums is None else [groups.scales, groups.minimums]
    halves = torch.stack(pairs, dim=-1).flatten(1).half().view(torch.uint8)
    data[:, layout.code_bytes : layout.code_bytes + halves.shape[1]] = halves


def _words(slots: Tensor, bits: int) -> Tensor:
    """Codes [rows, chunks, slots, group] of so many bits as words [rows, chunks, group]."""
    words = torch.zeros_like(slots[:, :, 0])
    for slot in range(slots.shape[2]):
        words |= slots[:, :, slot] << (bits * slot)
    return words
