"""Sampling on C++ kernels: whole rows of logits to tokens and log-probabilities. Knows no params and no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract import Draws, RowLogprobs
from .border import check_dims, checked

if TYPE_CHECKING:
    from _kvilt_native import KernelRunner


class NativeReductions:
    """Row by row on the runner's threads; a row is the same bits whatever stands beside it."""

    def __init__(self, runner: KernelRunner) -> None:
        self._runner = runner

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        _check(logits)
        ids, peaks = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        self._runner.argmax_with_values(logits, ids, peaks)
        return ids, peaks

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        return self._draw(logits, draws, None)

    def kept(self, logits: Tensor, draws: Draws) -> Tensor:
        _check(logits)
        kept = torch.empty((len(draws.rows), logits.shape[1]), dtype=torch.bool)
        self._draw(logits, draws, kept)
        return kept

    def _draw(self, logits: Tensor, draws: Draws, kept: Tensor | None) -> Tensor:
        _check(logits)
        tokens = torch.empty(len(draws.rows), dtype=torch.int64)
        top_k = [min(k, logits.shape[1]) for k in draws.top_k]  # a k may be too large for any integer of C++
        filters = (draws.temperatures, top_k, draws.top_p, draws.min_p, draws.typical_p)
        self._runner.draw(logits, draws.rows, draws.keys, *filters, tokens, kept)
        return tokens

    def logprobs(self, logits: Tensor, rows: Sequence[int], tokens: Sequence[int], top: int) -> RowLogprobs:
        _check(logits)
        count = len(rows)
        found = RowLogprobs(
            logprobs=torch.empty(count),
            ranks=torch.empty(count, dtype=torch.int64),
            top_ids=torch.empty((count, top), dtype=torch.int64),
            top_logprobs=torch.empty((count, top)),
        )
        to = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        self._runner.logprobs(logits, rows, tokens, *to)
        return found


def _check(logits: Tensor) -> None:
    check_dims("logits", logits, 2)
    checked("logits", logits, logits.shape)
