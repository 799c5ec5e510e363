"""How packed weights lie on the device: rows of codes, then their scales, so that kernels load words as they need them.

A word of 16 bits holds a code of each of several groups: code i of word c is column `i * group + c` of a chunk, and a
chunk has `group` words. So one load gives tensor cores several tiles, of one scale a row each. Codes of six bits have
two such blocks of words for their lower four bits, and one for the upper two of all. Codes that are floats have their
bits where a shift brings them into a bfloat16 (`_float_words`), and bytes as scales: exponents of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ...quant.float8 import CODES, SCALES
from ...quant.formats import FLOAT8, Format
from ...quant.groups import GROUPED_FORMATS, Groups, split_rows
from ...quant.tensor import QuantTensor
from ..contract import PackedWeight

PADDED = 256  # columns: rows are filled up to a multiple of it, with scales of zero
ALIGNED_BYTES = 128  # rows begin where lines of the cache do
FLOATS_ALIGNED_BYTES = 64  # or at halves of them: sixteen words of scales
SECTOR_BYTES = 32  # or where the parts of them do that memory hands out
SLAB = 1 << 26  # codes that are rearranged at a time
SPAN = 128  # columns


@dataclass(frozen=True, slots=True)
class PackedTile:
    """How a product is shared out: rows of a weight for a program, and spans of columns at a time.

    A product of few rows has a warp for each span, a product of several rows takes one span after the other.
    """

    outputs: int
    spans: int
    stages: int
    warps: int = 0  # 0: one for each span

    def options(self, padded: int, span: int, chunk: int) -> dict[str, int]:
        """As a launch takes it, for spans and chunks of so many columns; spans are halved until they fill all."""
        spans = self.spans
        while padded % (spans * span):
            spans //= 2
        chunks = spans * span // chunk
        return {"OUTPUTS": self.outputs, "CHUNKS": chunks, "STAGES": self.stages, "num_warps": self.warps or spans}


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    """The layout of one packed weight."""

    bits: int
    group: int
    offset: int
    minimums: bool
    columns: int
    floats: bool = False

    @property
    def slots(self) -> int:
        """Groups of a chunk."""
        return 8 if self.bits == 6 else 16 // self.bits

    @property
    def chunk(self) -> int:
        """Columns of a chunk."""
        return self.group * self.slots

    @property
    def padded(self) -> int:
        return -(-self.columns // PADDED) * PADDED

    @property
    def code_bytes(self) -> int:
        """Of a row; scales follow."""
        return self.padded * self.bits // 8

    @property
    def row_bytes(self) -> int:
        scale_bytes = self.padded // self.group * (4 if self.minimums else 1 if self.floats else 2)
        aligned = FLOATS_ALIGNED_BYTES if self.floats else ALIGNED_BYTES
        return -(-(self.code_bytes + scale_bytes) // aligned) * aligned


@dataclass(frozen=True, slots=True)
class Float8Layout:
    """The layout of a weight of 8-bit floats; the scales of a row, float32, follow its codes.

    A word of 16 bits holds columns `c` and `c + 64` of a chunk of 128.
    """

    columns: int
    blocks: bool  # a scale for each chunk, as opposed to one for the row

    @property
    def padded(self) -> int:
        """As many codes as chunks have; those behind the columns are zeros."""
        return -(-self.columns // SPAN) * SPAN

    @property
    def row_bytes(self) -> int:
        scale_bytes = 4 * (self.padded // SPAN if self.blocks else 1)
        return -(-(self.padded + scale_bytes) // SECTOR_BYTES) * SECTOR_BYTES


Layout: TypeAlias = GroupedLayout | Float8Layout


def packs(format_: Format) -> bool:
    """Whether there is a layout for a format."""
    return format_.name in GROUPED_FORMATS or format_.name == FLOAT8


def pack(weight: QuantTensor, device: torch.device) -> PackedWeight:
    """Bring a weight to the device in the layout of its format, a slab of rows at a time."""
    if weight.format.name == FLOAT8:
        return _pack_float8(weight, device)
    rows, columns = weight.shape
    one = GROUPED_FORMATS[weight.format.name]
    layout = GroupedLayout(one.bits, one.group, one.offset, one.minimums, columns, one.floats)
    data = torch.zeros((rows, layout.row_bytes), dtype=torch.uint8, device=device)
    step = max(1, SLAB // columns)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        _put(layout, data[start:stop], split_rows(weight, start, stop, device))
    return PackedWeight(weight.format.name, (rows, columns), data, layout)


def _pack_float8(weight: QuantTensor, device: torch.device) -> PackedWeight:
    (rows, columns), scales = weight.shape, weight.planes[SCALES].to(device)
    layout, block_rows = Float8Layout(columns, scales.shape[1] > 1), weight.format.planes[1].rows
    data = torch.zeros((rows, layout.row_bytes), dtype=torch.uint8, device=device)
    step = max(1, SLAB // columns)
    for start in range(0, rows, step):
        part = data[start : start + step]
        codes = torch.zeros((len(part), layout.padded), dtype=torch.uint8, device=device)
        codes[:, :columns] = weight.planes[CODES][start : start + step].to(device).view(torch.uint8)
        part[:, : layout.padded] = codes.view(len(part), -1, 2, SPAN // 2).transpose(2, 3).flatten(1)
        own = scales[torch.arange(start, start + len(part), device=device) // block_rows].view(torch.uint8)
        part[:, layout.padded : layout.padded + own.shape[1]] = own
    return PackedWeight(weight.format.name, (rows, columns), data, layout)


def _put(layout: GroupedLayout, data: Tensor, groups: Groups) -> None:
    codes = torch.zeros((len(data), layout.padded), dtype=torch.int32, device=data.device)
    codes[:, : layout.columns] = groups.codes
    slots = codes.view(len(data), -1, layout.slots, layout.group)
    if layout.bits == 6:
        parts = [_words(slots[:, :, :4] & 15, 4), _words(slots[:, :, 4:] & 15, 4), _words(slots >> 4, 2)]
        words = torch.cat(parts, dim=-1)
    else:
        words = _float_words(slots) if layout.floats else _words(slots, layout.bits)
    # Words of 16 bits out of 32: the first half of each, as bytes are ordered on every machine that has these kernels.
    data[:, : layout.code_bytes] = words.flatten(1).view(torch.int16)[:, ::2].contiguous().view(torch.uint8)
    scales = _scale_bytes(layout, groups)
    data[:, layout.code_bytes : layout.code_bytes + scales.shape[1]] = scales


def _scale_bytes(layout: GroupedLayout, groups: Groups) -> Tensor:
    if layout.floats:
        return (groups.scales.view(torch.int32) >> 23).to(torch.uint8)
    pairs = [groups.scales] if groups.minimums is None else [groups.scales, groups.minimums]
    return torch.stack(pairs, dim=-1).flatten(1).half().view(torch.uint8)


def _words(slots: Tensor, bits: int) -> Tensor:
    """Codes [rows, chunks, slots, group] of so many bits as words [rows, chunks, group]."""
    words = torch.zeros_like(slots[:, :, 0])
    for slot in range(slots.shape[2]):
        words |= slots[:, :, slot] << (bits * slot)
    return words


def _float_words(slots: Tensor) -> Tensor:
    """Codes [rows, chunks, 4, group] that are floats as words.

    In the place of a bfloat16's sign, and of the lowest bits of its exponent and the highest of its fraction, stands
    the first code. The next two stand three bits and six below, and the last where room is left.
    """
    sign, size = slots >> 3, slots & 7
    words = torch.zeros_like(slots[:, :, 0])
    for slot in range(3):
        words |= ((sign[:, :, slot] << 15) | (size[:, :, slot] << 6)) >> (3 * slot)
    sign, size = sign[:, :, 3], size[:, :, 3]
    return words | (sign << 14) | ((size & 1) << 13) | ((size >> 1) << 10)
