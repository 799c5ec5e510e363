"""Blocks of GGML's formats as plain codes with a scale and a minimum for each group of columns.

A weight is `scale * (code - offset) + minimum`, or its scale times a small float that is its code. This is what kernels
are given that have a layout of their own. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .tensor import QuantTensor


class Groups(NamedTuple):
    """A slab of rows, on the device of its blocks."""

    codes: Tensor  # uint8 [rows, columns]
    scales: Tensor  # float32 [rows, groups]
    minimums: Tensor | None  # likewise, of formats that have them


Splitter: TypeAlias = Callable[[Tensor], Groups]


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """Codes of `bits` from 0 on, `group` columns to a scale; `offset` is the code of zero.

    Codes of floats are a sign, two bits of an exponent and one of a fraction (E2M1), and scales are powers of two.
    """

    bits: int
    group: int
    offset: int
    split: Splitter  # of blocks [blocks, bytes]; rows are blocks then
    floats: bool = False

    @property
    def minimums(self) -> bool:
        return self.offset == 0 and not self.floats


def split_rows(weight: QuantTensor, start: int, stop: int, device: torch.device) -> Groups:
    """Some rows of a weight whose format is in the table."""
    format_, (_, columns) = weight.format, weight.shape
    grouped, blocks = GROUPED_FORMATS[format_.name], weight.blocks[start:stop].to(device)
    codes, scales, minimums = grouped.split(blocks.reshape(-1, format_.block_bytes))
    groups = (stop - start, columns // grouped.group)
    return Groups(
        codes.view(stop - start, columns), scales.view(groups), None if minimums is None else minimums.view(groups)
    )


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of the bytes before the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]), _half(blocks, 0), None)


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(blocks[:, 2:] ^ 128, _half(blocks, 0), None)  # signed bytes, from -128 on


def _q4_k(blocks: Tensor) -> Groups:
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (low & 15) | ((first >> 6) << 4)), dim=-1)
    minimums = torch.cat((second & 63, (low >> 4) | ((second >> 6) << 4)), dim=-1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return Groups(codes, _half(blocks, 0) * scales, -_half(blocks, 2) * minimums)


def _q6_k(blocks: Tensor) -> Groups:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
    codes = low | (((high >> shifts) & 3) << 4)
    return Groups(codes.flatten(1), _half(blocks, 208) * blocks[:, 192:208].view(torch.int8), None)


def _mxfp4(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 1:]), torch.exp2(blocks[:, :1].float() - 127), None)


GROUPED_FORMATS: Mapping[str, GroupedFormat] = MappingProxyType(
    {
        "Q4_0": GroupedFormat(4, 32, 8, _q4_0),
        "Q4_1": GroupedFormat(4, 32, 0, _q4_1),
        "Q4_K": GroupedFormat(4, 32, 0, _q4_k),
        "Q6_K": GroupedFormat(6, 16, 32, _q6_k),
        "Q8_0": GroupedFormat(8, 32, 128, _q8_0),
        "MXFP4": GroupedFormat(4, 32, 0, _mxfp4, floats=True),
    }
)
