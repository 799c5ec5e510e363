"""The GGML block formats by name and id: how many elements a block holds and how many bytes it takes.

A format stands here as soon as its size is certain, so that a file can be checked; whether it can be unpacked is
`unpack`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format: rows are sequences of blocks of `block_elements`, each `block_bytes` long."""

    name: str
    ggml_id: int
    block_elements: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of `columns` elements, which must fill whole blocks."""
        assert columns % self.block_elements == 0
        return columns // self.block_elements * self.block_bytes


# Q8_1 and Q8_K are left out: they exist only between kernels, and their size has changed between releases.
_ALL = (
    Format("F32", 0, 1, 4),
    Format("F16", 1, 1, 2),
    Format("Q4_0", 2, 32, 18),
    Format("Q4_1", 3, 32, 20),
    Format("Q5_0", 6, 32, 22),
    Format("Q5_1", 7, 32, 24),
    Format("Q8_0", 8, 32, 34),
    Format("Q2_K", 10, 256, 84),
    Format("Q3_K", 11, 256, 110),
    Format("Q4_K", 12, 256, 144),
    Format("Q5_K", 13, 256, 176),
    Format("Q6_K", 14, 256, 210),
    Format("IQ2_XXS", 16, 256, 66),
    Format("IQ2_XS", 17, 256, 74),
    Format("IQ3_XXS", 18, 256, 98),
    Format("IQ1_S", 19, 256, 50),
    Format("IQ4_NL", 20, 32, 18),
    Format("IQ3_S", 21, 256, 110),
    Format("IQ2_S", 22, 256, 82),
    Format("IQ4_XS", 23, 256, 136),
    Format("I8", 24, 1, 1),
    Format("I16", 25, 1, 2),
    Format("I32", 26, 1, 4),
    Format("I64", 27, 1, 8),
    Format("F64", 28, 1, 8),
    Format("IQ1_M", 29, 256, 56),
    Format("BF16", 30, 1, 2),
    Format("TQ1_0", 34, 256, 54),
    Format("TQ2_0", 35, 256, 66),
    Format("MXFP4", 39, 32, 17),
)

FORMATS: Mapping[str, Format] = MappingProxyType({format_.name: format_ for format_ in _ALL})
FORMATS_BY_ID: Mapping[int, Format] = MappingProxyType({format_.ggml_id: format_ for format_ in _ALL})
