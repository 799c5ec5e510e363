"""What a backend does for sampling: reductions of rows of logits, on the CPU or on its own device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .draw_table import DrawTable


@dataclass(frozen=True, slots=True)
class Draws:
    """How some rows draw their tokens; one entry of each for each row. What is off has its neutral value."""

    rows: Sequence[int]  # which rows of the logits
    keys: Sequence[int]  # of each row's noise, signed 64 bits
    temperatures: Sequence[float]
    top_k: Sequence[int]  # 0: off
    top_p: Sequence[float]  # 1: off
    min_p: Sequence[float]  # 0: off
    typical_p: Sequence[float]  # 1: off


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of one token a row, and the likeliest ones. NaN and rank 0 where a row has no largest logit."""

    logprobs: Tensor  # [rows] float32
    ranks: Tensor  # [rows] int64, 1 for the likeliest; among equals the lower id comes first
    top_ids: Tensor  # [rows, top] int64, likeliest first
    top_logprobs: Tensor  # [rows, top] float32


class Reductions(Protocol):
    """What sampling does to whole rows of float32 logits [rows, vocab], contiguous on the CPU; none is written to."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's first largest id and its logit; the first NaN where there is one."""
        ...

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """A token for each of the draws, -1 where the largest score is no number [draws]."""
        ...

    def kept(self, logits: Tensor, draws: Draws) -> Tensor:
        """The tokens that each draw chooses among, bool [draws, vocab]."""
        ...

    def logprobs(self, logits: Tensor, rows: Sequence[int], tokens: Sequence[int], top: int) -> RowLogprobs:
        """Of `tokens` in `rows`, one each, under the raw logits; `top` is at most the vocabulary."""
        ...


class SamplingKernels(Protocol):
    """Sampling on a backend's own device, for logits that are there; the host never waits."""

    def launch(self, logits: Tensor, table: DrawTable | None = None) -> Tensor:
        """The token of each row of logits [rows, vocab], and why it has none (`draw_table`): int64 [2, rows].

        Without a table that is the likeliest token of each row. Both are on the device; a row without a token has 0.
        Can be captured: all that may change stands in the table.
        """
        ...

    def logprobs(self, logits: Tensor, rows: Tensor | None, tokens: Tensor, top: int) -> RowLogprobs:
        """As `Reductions.logprobs`, with everything on the device; `tokens` are one for each of `rows`, None: all."""
        ...
