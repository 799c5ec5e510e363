"""Packed weights as blocks of bytes (Q8_0), for kernels that have no layout for their own format.

Numbers that the blocks cannot hold are rounded: by less than 0.4 % of the largest of their 32. 8-bit floats of at least
an eighth of the largest stay what they are, up to their scale's rounding to 16 bits. Knows no kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from ..errors import Unsupported
from .float8 import BLOCK, CODES, SCALES
from .formats import FLOAT8, FORMATS
from .tensor import QuantTensor
from .unpack import dequantize

BLOCK_ELEMENTS = 32
_SLAB_ELEMENTS = 1 << 20
_TOP_BIT = 6  # of codes: the largest number of a block becomes 64 or more


def byte_blocks(weight: QuantTensor) -> QuantTensor:
    """A matrix as Q8_0, a slab of rows at a time; the last block of a row is filled up with zeros."""
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK_ELEMENTS)
    out = torch.empty((rows, FORMATS["Q8_0"].row_bytes(blocks * BLOCK_ELEMENTS)), dtype=torch.uint8)
    step = max(1, _SLAB_ELEMENTS // columns // BLOCK) * BLOCK  # whole blocks of scales
    encode = _of_float8 if weight.format.name == FLOAT8 else _of_any
    for start in range(0, rows, step):
        part = weight.rows(start, min(rows, start + step))
        codes, scales = encode(part)
        own = torch.cat((scales.view(-1, 1).view(torch.uint8), codes.view(torch.uint8).view(-1, BLOCK_ELEMENTS)), 1)
        out[start : start + step] = own.view(part.shape[0], -1)
    return QuantTensor.of_blocks(FORMATS["Q8_0"], (rows, blocks * BLOCK_ELEMENTS), out)


def _in_blocks(x: Tensor) -> Tensor:
    """[rows, columns] as [rows, blocks, 32]."""
    padded = F.pad(x, (0, -x.shape[1] % BLOCK_ELEMENTS))
    return padded.view(len(x), -1, BLOCK_ELEMENTS)


def _of_any(weight: QuantTensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, blocks, 32] and scales float16 [rows, blocks]."""
    x = _in_blocks(dequantize(weight))
    scales = (_peaks(x) / 127).half()
    return _codes(x, scales.float()), scales


def _of_float8(weight: QuantTensor) -> tuple[Tensor, Tensor]:
    """Likewise, in steps of a power of two: a number of four bits is then whole in the largest four binades."""
    x = _in_blocks(weight.planes[CODES].float())
    peaks = _peaks(x)
    steps = torch.ldexp(torch.ones_like(peaks), torch.frexp(peaks).exponent - 1 - _TOP_BIT)
    shared = weight.format.planes[1]  # how many rows and columns share a scale
    rows = torch.arange(len(x)) // shared.rows
    columns = torch.arange(x.shape[1]) * BLOCK_ELEMENTS // shared.columns
    return _codes(x, steps), (steps * weight.planes[SCALES][rows][:, columns]).half()


def _peaks(x: Tensor) -> Tensor:
    """The largest magnitude of each block."""
    peaks = x.abs().amax(-1)
    if not bool(torch.isfinite(peaks).all()):
        raise Unsupported("the weight has numbers that are not finite")
    return peaks


def _codes(x: Tensor, steps: Tensor) -> Tensor:
    safe = torch.where(steps > 0, steps, 1.0)
    return (x / safe[..., None]).round_().clamp_(-127, 127).to(torch.int8)
