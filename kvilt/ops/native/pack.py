"""Weights in the layout of the native kernels: tiles of sixteen outputs, interleaved so that lanes are outputs.

The numbers of the kinds and the order of bytes are shared with csrc/kernels.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from ...quant.tensor import QuantTensor, Weight
from ...quant.unpack import dequantize

TILE, BLOCK = 16, 32
FLOAT, NIBBLE16, NIBBLE32, BYTE16, BYTE32, BYTE_HALVES = range(6)

KINDS = ("float32", "4 bits", "4 bits, float32 scales", "8 bits", "8 bits, minimum", "8 bits, scales of 16")


@dataclass(frozen=True, slots=True)
class Layout:
    """A weight's bytes in the kernels' order."""

    kind: int
    outputs: int
    inputs: int
    data: Tensor  # uint8


@dataclass(frozen=True, slots=True)
class Affine:
    """A weight as scale * q + minimum: what all block formats come down to."""

    q: Tensor  # [rows, inputs] uint8 (nibbles) or int8
    scale: Tensor  # [rows, inputs / 32], or / 16 for halves
    minimum: Tensor | None  # [rows, inputs / 32]


def pack(weight: Weight) -> Layout:
    """The weight as the kernels want it. Formats without a kernel of their own become float32."""
    if isinstance(weight, QuantTensor) and weight.format.name in _READERS:
        kind, read = _READERS[weight.format.name]
        return _pack_blocks(kind, read(weight), weight.shape)
    plain = dequantize(weight) if isinstance(weight, QuantTensor) else weight.to(torch.float32)
    return _pack_float(plain)


def _pack_float(plain: Tensor) -> Layout:
    rows, inputs = plain.shape
    padded = F.pad(plain, (0, 0, 0, -rows % TILE))
    tiles = padded.view(-1, TILE, inputs).transpose(1, 2).contiguous()  # [tiles, inputs, 16]
    return Layout(FLOAT, rows, inputs, tiles.view(torch.uint8).view(-1))


def _pack_blocks(kind: int, affine: Affine, shape: tuple[int, ...]) -> Layout:
    rows, inputs = shape
    q = F.pad(affine.q, (0, -inputs % BLOCK, 0, -rows % TILE))
    tiles, blocks = q.shape[0] // TILE, q.shape[1] // BLOCK
    if kind in (NIBBLE16, NIBBLE32):
        # Byte (step, output, input of the step): the low half has inputs 0-15 of the block, the high half 16-31.
        parts = q.view(tiles, TILE, blocks, 2, 4, 4).permute(3, 0, 2, 4, 1, 5)  # [2, tiles, blocks, 4, 16, 4]
        weights = parts[0] | (parts[1] << 4)
    else:
        weights = (
            q.view(torch.uint8).view(tiles, TILE, blocks, 8, 4).permute(0, 2, 3, 1, 4)
        )  # [tiles, blocks, 8, 16, 4]
    pieces = [weights.reshape(tiles, blocks, -1)]
    half = kind in (NIBBLE16, BYTE16)
    per_block = affine.scale.shape[1] // blocks
    scales = [affine.scale[:, i::per_block] for i in range(per_block)]
    scales += [] if affine.minimum is None else [affine.minimum]
    for scale in scales:
        wide = F.pad(scale.to(torch.float16 if half else torch.float32), (0, 0, 0, -rows % TILE))
        lanes = wide.view(tiles, TILE, blocks).permute(0, 2, 1).contiguous()
        pieces.append(lanes.view(torch.uint8).view(tiles, blocks, -1))
    return Layout(kind, rows, inputs, torch.cat(pieces, dim=-1).view(-1))


# Readers: from a file's blocks to Affine.


def _blocks(weight: QuantTensor) -> Tensor:
    """[rows, blocks, bytes of a block]."""
    return weight.data.view(weight.shape[0], -1, weight.format.block_bytes)


def _half(data: Tensor, start: int) -> Tensor:
    """A float16 of each block, as float32 [rows, blocks]."""
    return data[..., start : start + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(data: Tensor) -> Tensor:
    """Sixteen bytes of a block as 32 values: low halves first."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _flat(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1)


def _q4_0(weight: QuantTensor) -> Affine:
    data = _blocks(weight)
    scale = _half(data, 0)
    return Affine(_flat(_nibbles(data[..., 2:18])), scale, scale * -8)


def _q4_1(weight: QuantTensor) -> Affine:
    data = _blocks(weight)
    return Affine(_flat(_nibbles(data[..., 4:20])), _half(data, 0), _half(data, 2))


def _fifth_bits(data: Tensor) -> Tensor:
    """Four bytes of a block as 32 high bits, already in their place."""
    bits = torch.arange(8, dtype=torch.uint8)
    return (((data.unsqueeze(-1) >> bits) & 1) << 4).flatten(-2)


def _q5_0(weight: QuantTensor) -> Affine:
    data = _blocks(weight)
    q = (_nibbles(data[..., 6:22]) | _fifth_bits(data[..., 2:6])).to(torch.int8) - 16
    return Affine(_flat(q), _half(data, 0), None)


def _q5_1(weight: QuantTensor) -> Affine:
    data = _blocks(weight)
    q = (_nibbles(data[..., 8:24]) | _fifth_bits(data[..., 4:8])).to(torch.int8)
    return Affine(_flat(q), _half(data, 0), _half(data, 2))


def _q8_0(weight: QuantTensor) -> Affine:
    data = _blocks(weight)
    return Affine(_flat(data[..., 2:34].contiguous().view(torch.int8)), _half(data, 0), None)


def _k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes as eight scales and eight minimums of six bits, [rows, blocks, 8] each."""
    low, high, mixed = data[..., 0:4], data[..., 4:8], data[..., 8:12]
    scales = torch.cat([low & 63, (mixed & 15) | ((low >> 6) << 4)], dim=-1)
    minimums = torch.cat([high & 63, (mixed >> 4) | ((high >> 6) << 4)], dim=-1)
    return scales.float(), minimums.float()


def _k_quant(weight: QuantTensor, q: Tensor) -> Affine:
    data = _blocks(weight)
    scales, minimums = _k_scales(data[..., 4:16])
    scale = _half(data, 0).unsqueeze(-1) * scales
    minimum = _half(data, 2).unsqueeze(-1) * -minimums
    return Affine(_flat(q), _flat(scale), _flat(minimum))


def _k_nibbles(data: Tensor) -> Tensor:
    """128 bytes as 256 values: each 32 bytes hold two runs of 32, low halves first."""
    return _nibbles(data.unflatten(-1, (4, 32))).flatten(-2)  # type: ignore[no-untyped-call]


def _q4_k(weight: QuantTensor) -> Affine:
    return _k_quant(weight, _k_nibbles(_blocks(weight)[..., 16:144]))


def _q5_k(weight: QuantTensor) -> Affine:
    data = _blocks(weight)
    bits = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = ((data[..., 16:48].unsqueeze(-2) >> bits) & 1).flatten(-2) << 4  # bit j of a byte belongs to run j
    return _k_quant(weight, (_k_nibbles(data[..., 48:176]) | high).to(torch.int8))


def _q6_k(weight: QuantTensor) -> Affine:
    data = _blocks(weight)
    low = data[..., 0:128].unflatten(-1, (2, 64))  # type: ignore[no-untyped-call]
    high = data[..., 128:192].unflatten(-1, (2, 32))  # type: ignore[no-untyped-call]
    nibbles = torch.cat([low & 15, low >> 4], dim=-1)
    tops = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    q = (nibbles | (tops << 4)).to(torch.int8) - 32
    scales = data[..., 192:208].contiguous().view(torch.int8).float()
    scale = _half(data, 208).unsqueeze(-1) * scales
    return Affine(_flat(q), _flat(scale), None)


_READERS: Mapping[str, tuple[int, Callable[[QuantTensor], Affine]]] = MappingProxyType(
    {
        "Q4_0": (NIBBLE16, _q4_0),
        "Q4_1": (NIBBLE16, _q4_1),
        "Q5_0": (BYTE16, _q5_0),
        "Q5_1": (BYTE32, _q5_1),
        "Q8_0": (BYTE16, _q8_0),
        "Q4_K": (NIBBLE32, _q4_k),
        "Q5_K": (BYTE32, _q5_k),
        "Q6_K": (BYTE_HALVES, _q6_k),
    }
)
