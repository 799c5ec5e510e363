"""A weight as it lies in memory: an ordinary tensor, or planes with the format that explains them.

Knows no file and no arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from ..errors import Unsupported
from .float8 import BLOCK, CODES, SCALES
from .formats import Format, float8_format
from .ggml_blocks import BLOCKS


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """One packed weight; blocks run along the last axis, and over rows where the format says so."""

    format: Format
    shape: tuple[int, ...]  # elements, torch order
    planes: Mapping[str, torch.Tensor]  # by name, as the format describes them; views of the mapped file, never written

    def __post_init__(self) -> None:
        assert list(self.planes) == [plane.name for plane in self.format.planes], (
            f"not the planes of {self.format.name}"
        )
        for plane in self.format.planes:
            found, expected = self.planes[plane.name], plane.shape(prod(self.shape[:-1]), self.shape[-1])
            assert found.dtype == plane.dtype, f"{plane.name}: {found.dtype} is not {plane.dtype}"
            assert tuple(found.shape) == expected, f"{plane.name}: {tuple(found.shape)} is not {expected}"

    @classmethod
    def of_blocks(cls, format_: Format, shape: tuple[int, ...], blocks: torch.Tensor) -> QuantTensor:
        """A weight in a format of GGML, from its uint8 [rows, row_bytes]."""
        return cls(format_, shape, {BLOCKS: blocks})

    @classmethod
    def of_float8(cls, codes: torch.Tensor, scales: torch.Tensor) -> QuantTensor:
        """8-bit floats [rows, columns] and their scales: one, one a row, or one for each 128 x 128 block."""
        rows, columns = codes.shape
        if scales.numel() == 1:
            block = (rows, columns)
        elif scales.shape in ((rows,), (rows, 1)):
            block = (1, columns)
        elif scales.shape == (-(-rows // BLOCK), -(-columns // BLOCK)):
            block = (BLOCK, BLOCK)
        else:
            raise ValueError(f"scales {list(scales.shape)} are not those of {rows} x {columns} 8-bit floats")
        planes = {CODES: codes, SCALES: scales.float().reshape(-(-rows // block[0]), -(-columns // block[1]))}
        return cls(float8_format(*block), (rows, columns), planes)

    @property
    def blocks(self) -> torch.Tensor:
        """The one plane of a format of GGML."""
        return self.planes[BLOCKS]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes.values())

    def rows(self, start: int, stop: int) -> QuantTensor:
        """Some rows as a matrix, which must begin and end where blocks do, or lie in one block.

        Of more than two dimensions all but the last are rows.
        """
        parts, all_rows = {}, prod(self.shape[:-1])
        for plane in self.format.planes:
            whole = start % plane.rows == 0 and (stop % plane.rows == 0 or stop == all_rows)
            assert whole or start // plane.rows == (stop - 1) // plane.rows
            parts[plane.name] = self.planes[plane.name][start // plane.rows : -(-stop // plane.rows)]
        return QuantTensor(self.format, (stop - start, self.shape[-1]), parts)

    def columns(self, start: int, stop: int) -> QuantTensor:
        """Some columns of a matrix, which must begin and end where blocks do, or lie in one block."""
        parts = {}
        for plane in self.format.planes:
            size, whole = (
                plane.columns,
                start % plane.columns == 0 and (stop % plane.columns == 0 or stop == self.shape[-1]),
            )
            assert whole or start // size == (stop - 1) // size
            own = slice(start // size * plane.numbers, -(-stop // size) * plane.numbers)
            parts[plane.name] = self.planes[plane.name][:, own].contiguous()
        return QuantTensor(self.format, (self.shape[0], stop - start), parts)

    def take(self, rows: torch.Tensor) -> QuantTensor:
        """Rows of a matrix in another order; no block may lie over several of them."""
        if any(plane.rows != 1 for plane in self.format.planes):
            raise Unsupported(f"{self.format.name} has blocks of several rows, whose order cannot be changed")
        parts = {name: plane[rows] for name, plane in self.planes.items()}
        return QuantTensor(self.format, (len(rows), self.shape[1]), parts)


Weight: TypeAlias = torch.Tensor | QuantTensor
