"""What comes back from a step: logits, scores, hidden states, and what some rows wanted to see of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .row import UnrotatedKV


@dataclass(frozen=True, slots=True)
class Scores:
    """What a Score row gets back."""

    logprobs: Tensor  # [targets] float32
    top_ids: Tensor  # [targets, top] int64
    top_logprobs: Tensor  # [targets, top] float32
    ranks: Tensor  # [targets] int64, 1 for the likeliest, among equals the lower id first; [0] where not wanted


@dataclass(frozen=True, slots=True)
class Logits:
    """Results of a step. Rows of `values` stand in batch order."""

    values: Tensor  # [n, vocab] float32: the wanted positions of all Last rows
    starts: tuple[int, ...]  # rows + 1 offsets into values
    scores: Mapping[int, Scores]  # by row
    hidden: Mapping[int, Tensor]  # by row, [tokens, hidden]; of a Pooled row [hidden] float64
    kv: Mapping[int, Mapping[int, UnrotatedKV]] = field(default_factory=dict)  # by row and layer
    mass: Mapping[int, Tensor] = field(default_factory=dict)  # by row, [last position + 1] float32
    queries: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)  # by row and layer, [tokens, heads, dim]

    def of_row(self, row: int) -> Tensor:
        """[k, vocab] of one row."""
        return self.values[self.starts[row] : self.starts[row + 1]]
