"""The formats of packed weights: which planes a weight in each of them has, and how they are unpacked.

A weight lies in memory as one or more planes. GGML's formats have one: blocks of bytes that hold codes and scales side
by side. Formats with codes, scales and zeros apart (GPTQ, AWQ, FP8 by blocks) have one plane for each. A format stands
here as soon as its size is certain, so that a file can be checked; without a dequantizer it is refused when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from .float8 import BLOCK, CODES, SCALES, by_scales
from .ggml_blocks import BLOCKS, UNPACKERS, Dequantizer, by_blocks


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a packed weight: `numbers` of `dtype` for each block of `rows` x `columns` elements."""

    name: str
    dtype: torch.dtype
    rows: int
    columns: int
    numbers: int = 1

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of the plane of a weight [rows, columns]; blocks at the edges may be cut."""
        return -(-rows // self.rows), -(-columns // self.columns) * self.numbers


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is stored, complete: its planes, and the reference way to unpack them."""

    name: str
    planes: tuple[Plane, ...]
    dequantize: Dequantizer | None = None  # None: not written yet
    ggml_id: int | None = None  # of a format of GGML, whose one plane is rows of blocks

    @property
    def packed(self) -> bool:
        """Whether numbers share blocks; otherwise they stand by themselves, as in an ordinary tensor."""
        return any(plane.rows * plane.columns > 1 for plane in self.planes)

    @property
    def block_elements(self) -> int:
        """Elements of a block of a GGML format."""
        return self._blocks.columns

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of a GGML format."""
        return self._blocks.numbers

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of `columns` elements of a GGML format, which must fill whole blocks."""
        assert columns % self.block_elements == 0
        return columns // self.block_elements * self.block_bytes

    @property
    def _blocks(self) -> Plane:
        assert self.ggml_id is not None, f"{self.name} has no blocks of bytes"
        return self.planes[0]


def ggml_format(name: str, ggml_id: int, block_elements: int, block_bytes: int) -> Format:
    """A format of GGML: rows are sequences of blocks of `block_elements`, each `block_bytes` long."""
    plane = Plane(BLOCKS, torch.uint8, 1, block_elements, block_bytes)
    unpacker = UNPACKERS.get(name)
    dequantize = None if unpacker is None else by_blocks(unpacker, block_elements, block_bytes)
    return Format(name, (plane,), dequantize, ggml_id)


def float8_format(rows: int = BLOCK, columns: int = BLOCK) -> Format:
    """8-bit floats with a scale for each block of `rows` x `columns`."""
    planes = (Plane(CODES, torch.float8_e4m3fn, 1, 1), Plane(SCALES, torch.float32, rows, columns))
    return Format(FLOAT8, planes, by_scales(rows, columns))


FLOAT8 = "F8_E4M3"  # as safetensors calls these numbers

# Q8_1 and Q8_K are left out: they exist only between kernels, and their size has changed between releases.
_ALL = (
    ggml_format("F32", 0, 1, 4),
    ggml_format("F16", 1, 1, 2),
    ggml_format("Q4_0", 2, 32, 18),
    ggml_format("Q4_1", 3, 32, 20),
    ggml_format("Q5_0", 6, 32, 22),
    ggml_format("Q5_1", 7, 32, 24),
    ggml_format("Q8_0", 8, 32, 34),
    ggml_format("Q2_K", 10, 256, 84),
    ggml_format("Q3_K", 11, 256, 110),
    ggml_format("Q4_K", 12, 256, 144),
    ggml_format("Q5_K", 13, 256, 176),
    ggml_format("Q6_K", 14, 256, 210),
    ggml_format("IQ2_XXS", 16, 256, 66),
    ggml_format("IQ2_XS", 17, 256, 74),
    ggml_format("IQ3_XXS", 18, 256, 98),
    ggml_format("IQ1_S", 19, 256, 50),
    ggml_format("IQ4_NL", 20, 32, 18),
    ggml_format("IQ3_S", 21, 256, 110),
    ggml_format("IQ2_S", 22, 256, 82),
    ggml_format("IQ4_XS", 23, 256, 136),
    ggml_format("I8", 24, 1, 1),
    ggml_format("I16", 25, 1, 2),
    ggml_format("I32", 26, 1, 4),
    ggml_format("I64", 27, 1, 8),
    ggml_format("F64", 28, 1, 8),
    ggml_format("IQ1_M", 29, 256, 56),
    ggml_format("BF16", 30, 1, 2),
    ggml_format("TQ1_0", 34, 256, 54),
    ggml_format("TQ2_0", 35, 256, 66),
    ggml_format("MXFP4", 39, 32, 17),
    float8_format(),  # blocks of other sizes have its name
)

FORMATS: Mapping[str, Format] = MappingProxyType({format_.name: format_ for format_ in _ALL})
FORMATS_BY_ID: Mapping[int, Format] = MappingProxyType(
    {format_.ggml_id: format_ for format_ in _ALL if format_.ggml_id is not None}
)
