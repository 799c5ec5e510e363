"""A weight as it lies in memory: an ordinary tensor, or packed blocks with the format that explains them.

Knows no file and no arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from .formats import Format


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """Packed blocks of one weight; blocks run along the last axis."""

    format: Format
    shape: tuple[int, ...]  # elements, torch order
    data: torch.Tensor  # uint8 [rows, row_bytes]; a view of the mapped file, never written

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.uint8
        expected = (prod(self.shape[:-1]), self.format.row_bytes(self.shape[-1]))
        assert tuple(self.data.shape) == expected, f"{tuple(self.data.shape)} is not {expected}"

    @property
    def nbytes(self) -> int:
        """Bytes of the packed blocks."""
        return self.data.numel()


Weight: TypeAlias = torch.Tensor | QuantTensor
