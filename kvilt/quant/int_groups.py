"""Whole-number weights with a scale and a zero for each group of columns, as blocks of a GGML format.

GPTQ, AWQ and compressed-tensors store them each in a way of its own; blocks have kernels on every backend. A weight is
scale * (code - zero). Knows no file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .encode import nibble_pairs
from .formats import FORMATS
from .tensor import QuantTensor, Weight

_BLOCK = 32


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """The numbers of `bits` in 32-bit words, lowest first, as uint8; `dim` of the words grows."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    spread = (
        words.movedim(dim, -1).unsqueeze(-1) >> shifts
    )  # an arithmetic shift: the mask takes the copies of the sign
    return (spread & ((1 << bits) - 1)).flatten(-2).to(torch.uint8).movedim(-1, dim)


def format_for(inputs: int, scales: Tensor, zeros: Tensor, bits: int) -> str | None:
    """The format whose blocks hold groups with these scales and zeros [outputs, groups]; None where floats must.

    With zeros in the middle that is exact: Q4_0 and Q8_0. Other zeros of 4 bits are Q4_1, whose minimum, scale * zero,
    is rounded to 16 bits.
    """
    group, centred = inputs // scales.shape[1], bool((zeros == 1 << (bits - 1)).all())
    if group % _BLOCK or not bool((scales.half().float() == scales.float()).all()):
        return None
    return {(4, True): "Q4_0", (4, False): "Q4_1", (8, True): "Q8_0"}.get((bits, centred))


def blocks_of(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Weight:
    """Codes uint8 [outputs, inputs] as blocks, or as floats where no blocks hold them."""
    outputs, inputs = codes.shape
    name = format_for(inputs, scales, zeros, bits)
    if name is None:
        return dense(codes, scales, zeros)

    def for_blocks(numbers: Tensor) -> Tensor:
        return numbers.half().repeat_interleave(inputs // scales.shape[1] // _BLOCK, 1).reshape(-1, 1).view(torch.uint8)

    own, header = codes.reshape(-1, _BLOCK), [for_blocks(scales)]
    if name == "Q4_1":
        header.append(for_blocks(-scales.float() * zeros))
    packed = own ^ 128 if bits == 8 else nibble_pairs(own)
    return QuantTensor.of_blocks(FORMATS[name], (outputs, inputs), torch.cat((*header, packed), 1).view(outputs, -1))


def dense(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor | None = None) -> Tensor:
    """The weight as floats of 16 bits; `group_of` [inputs] where columns of a group do not stand together."""
    if group_of is None:
        group_of = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    wide = scales.float()[:, group_of] * (codes.float() - zeros.float()[:, group_of])
    return wide.to(scales.dtype if scales.dtype in (torch.float16, torch.bfloat16) else torch.float32)
