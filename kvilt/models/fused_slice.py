"""A part of a tensor that holds several, one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..quant.tensor import QuantTensor, Weight


@dataclass(frozen=True, slots=True)
class FusedSlice:
    """Rows [start, stop) of a tensor that holds several."""

    whole: str
    start: int
    stop: int
    order: Sequence[int] | None = None  # the rows of the whole, where they are not in the order of its parts
    last: bool = True  # the whole is not needed after it; the others read the file again

    @property
    def wholes(self) -> tuple[str, ...]:
        return (self.whole,)

    def take(self, whole: Weight) -> Weight:
        """These rows, packed or not; blocks never cross rows."""
        if self.order is not None:
            rows = torch.tensor(self.order[self.start : self.stop])
            return whole.take(rows) if isinstance(whole, QuantTensor) else whole[rows]
        if isinstance(whole, QuantTensor):
            return whole.rows(self.start, self.stop)
        rows = whole.flatten(0, -2) if whole.dim() > 2 else whole  # several matrices are one above the other
        return rows[self.start : self.stop]
