"""How the blocks of each GGML format become floats, bit for bit what GGML's definition of the format says.

Plain torch, a slab of blocks at a time, so that temporaries stay in the processor's cache. Knows no file and no table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from .grids import even_signs, iq2_xs_grid, iq3_s_grid

# The one plane of a GGML format: uint8 [rows, bytes].
BLOCKS = "blocks"

# Elements unpacked at a time: small enough for the cache, large enough to hide the cost of a call.
_SLAB_ELEMENTS = 1 << 18

# The sixteen values of an IQ4_NL nibble: steps grow away from zero, as weights thin out there.
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Twice the sixteen values of MXFP4, whole numbers: its scale is halved instead.
_FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Fills out [blocks, block_elements] float32 from blocks [blocks, block_bytes] uint8. Products and sums are separate
# roundings, in the order of GGML's own code; a fused multiply-add would differ in the last bit.
Unpacker: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]

# The planes of a weight by name, its shape and the dtype that is wanted, to an ordinary tensor.
Dequantizer: TypeAlias = Callable[[Mapping[str, torch.Tensor], tuple[int, ...], torch.dtype], torch.Tensor]


def by_blocks(unpacker: Unpacker, block_elements: int, block_bytes: int) -> Dequantizer:
    """A dequantizer that goes over the blocks slab by slab."""

    def dequantize(planes: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        blocks = planes[BLOCKS].view(-1, block_bytes)
        out = torch.empty(shape, dtype=dtype)
        slots = out.view(-1, block_elements)
        step = _SLAB_ELEMENTS // block_elements
        floats = None if dtype == torch.float32 else torch.empty(step, block_elements)
        for part, slot in zip(torch.split(blocks, step), torch.split(slots, step), strict=True):
            if floats is None:
                unpacker(part, slot)
            else:
                unpacker(part, floats[: len(part)])
                slot.copy_(floats[: len(part)])
        return out

    return dequantize


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block, widened: [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Low halves of the bytes into the first half of `out`, high halves into the second."""
    width = packed.shape[-1]
    out[..., :width] = packed & 15
    out[..., width:] = packed >> 4


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """32 bits from 4 bytes, lowest first, each worth 16: [blocks, 32] uint8."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2) << 4


def _f32(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.float32))


def _f16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.float16))


def _bf16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.bfloat16))


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _iq4_nl(blocks: torch.Tensor, out: torch.Tensor) -> None:
    levels = torch.tensor(_IQ4_LEVELS, dtype=torch.float32)
    packed = blocks[:, 2:].int()
    out.copy_(levels[torch.cat((packed & 15, packed >> 4), dim=-1)])
    out.mul_(_half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    levels = torch.tensor(_IQ4_LEVELS, dtype=torch.float32)
    packed = blocks[:, 8:].view(-1, 8, 16).int()
    values = out.view(-1, 8, 32)
    values.copy_(levels[torch.cat((packed & 15, packed >> 4), dim=-1)])
    shifts = torch.arange(0, 16, 2, dtype=torch.int32)
    high = (blocks[:, 2:3].int() | (blocks[:, 3:4].int() << 8)) >> shifts & 3  # two bits of each part
    scales = (_small_nibbles(blocks[:, 4:8]) | (high << 4)) - 32
    values.mul_((_half(blocks, 0) * scales).unsqueeze(-1))


def _small_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Both halves of each byte, the low one first: int32."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).int()


def _iq3_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    bits = torch.arange(8, dtype=torch.uint8)
    ninth = (blocks[:, 66:74].unsqueeze(-1) >> bits & 1).flatten(1).int()
    values = out.view(-1, 8, 32)
    values.copy_(iq3_s_grid()[blocks[:, 2:66].int() | (ninth << 8)].view(values.shape))
    scales = _half(blocks, 0) * (1 + 2 * _small_nibbles(blocks[:, 106:110]))
    values.mul_(scales.unsqueeze(-1))
    out.mul_(1.0 - 2.0 * (blocks[:, 74:106].unsqueeze(-1) >> bits & 1).flatten(1))


def _iq2_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    codes = blocks[:, 2:66].contiguous().view(torch.int16).int() & 0xFFFF
    values = out.view(-1, 32, 8)
    values.copy_(iq2_xs_grid()[codes & 511])
    scales = _half(blocks, 0) * (0.5 + _small_nibbles(blocks[:, 66:74])) * 0.25
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1))
    values.mul_(even_signs()[codes >> 9])


def _mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    levels = torch.tensor(_FP4_LEVELS, dtype=torch.float32)
    packed = blocks[:, 1:].int()
    out.copy_(levels[torch.cat((packed & 15, packed >> 4), dim=-1)])
    out.mul_(torch.exp2(blocks[:, :1].double() - 128).float())


def _crumbs(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Two-bit values of 64 bytes: each half of the block reads 32 bytes four times, lowest bits first."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    out.view(-1, 2, 4, 32).copy_((packed.view(-1, 2, 1, 32) >> shifts) & 3)


def _q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _crumbs(blocks[:, 16:80].contiguous(), out)
    header = blocks[:, :16]  # low halves scale, high halves shift
    values = out.view(-1, 16, 16)
    values.mul_((_half(blocks, 80) * (header & 15)).unsqueeze(-1))
    values.sub_((_half(blocks, 82) * (header >> 4)).unsqueeze(-1))


def _q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _crumbs(blocks[:, 32:96].contiguous(), out)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    low_third = ~(blocks[:, :32].unsqueeze(1) >> shifts) & 1  # bit i of byte j: value j of group i; a clear bit is -4
    out.view(-1, 8, 32).sub_(low_third << 2)
    out.view(-1, 16, 16).mul_((_half(blocks, 108) * _six_bit_scales(blocks[:, 96:108])).unsqueeze(-1))


def _six_bit_scales(packed: torch.Tensor) -> torch.Tensor:
    """Sixteen scales from -32 to 31 out of 12 bytes: nibbles in the first 8, the top two bits in the last 4."""
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), dim=-1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = ((packed[:, 8:].unsqueeze(1) >> shifts) & 3).flatten(1)
    return (low | (high << 4)).to(torch.int8) - 32


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight 6-bit scales and eight 6-bit minimums from 12 bytes: two [blocks, 8] uint8.

    The first four of each lie whole in bytes 0..3 and 4..7, whose top two bits hold the top of the last four; the
    low nibbles of those lie in bytes 8..11.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (low & 15) | ((first >> 6) << 4)), dim=-1)
    minimums = torch.cat((second & 63, (low >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales, minimums


def _scale_k(blocks: torch.Tensor, values: torch.Tensor) -> None:
    """Scale and shift values [blocks, 8, 32] in place by the header of a Q4_K or Q5_K block."""
    scales, minimums = _scales_and_mins(blocks[:, 4:16])
    values.mul_((_half(blocks, 0) * scales).unsqueeze(-1))
    values.sub_((_half(blocks, 2) * minimums).unsqueeze(-1))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 64))
    _scale_k(blocks, out.view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 48:].view(-1, 4, 32), out.view(-1, 4, 64))
    values = out.view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    values.add_(((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4)  # bit i of byte j: value j of group i
    _scale_k(blocks, values)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    low = blocks[:, :128].view(-1, 2, 64)
    high = blocks[:, 128:192].view(-1, 2, 1, 32)
    scales = blocks[:, 192:208].view(torch.int8)
    _nibbles(low, out.view(-1, 2, 128))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    out.view(-1, 2, 4, 32).add_(((high >> shifts) & 3) << 4)
    out.sub_(32)
    out.view(-1, 16, 16).mul_((_half(blocks, 208) * scales).unsqueeze(-1))


UNPACKERS: Mapping[str, Unpacker] = MappingProxyType(
    {
        "F32": _f32,
        "F16": _f16,
        "BF16": _bf16,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
        "IQ3_S": _iq3_s,
        "IQ2_XS": _iq2_xs,
        "MXFP4": _mxfp4,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
