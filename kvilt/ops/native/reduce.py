"""Sampling on C++ kernels: whole rows of logits to tokens and log-probabilities. Knows no params and no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import Draws, RowLogprobs
from .border import check_dims, checked


class NativeReductions:
    """Row by row on the engine's threads; a row is the same bits whatever stands beside it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows = _rows(logits)
        ids, peaks = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        self._engine.peaks(*rows, ids.data_ptr(), peaks.data_ptr())
        return ids, peaks

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        return self._draw(logits, draws, None)

    def kept(self, logits: Tensor, draws: Draws) -> Tensor:
        _rows(logits)
        kept = torch.empty((len(draws.rows), logits.shape[1]), dtype=torch.bool)
        self._draw(logits, draws, kept)
        return kept

    def _draw(self, logits: Tensor, draws: Draws, kept: Tensor | None) -> Tensor:
        at = _rows(logits)
        tokens = torch.empty(len(draws.rows), dtype=torch.int64)
        top_k = [min(k, logits.shape[1]) for k in draws.top_k]  # a k may be too large for any integer of C++
        filters = (draws.temperatures, top_k, draws.top_p, draws.min_p, draws.typical_p)
        to = (tokens.data_ptr(), 0 if kept is None else kept.data_ptr())
        self._engine.draw(*at, draws.rows, draws.keys, *filters, *to)
        return tokens

    def logprobs(self, logits: Tensor, rows: Sequence[int], tokens: Sequence[int], top: int) -> RowLogprobs:
        count = len(rows)
        found = RowLogprobs(
            logprobs=torch.empty(count),
            ranks=torch.empty(count, dtype=torch.int64),
            top_ids=torch.empty((count, top), dtype=torch.int64),
            top_logprobs=torch.empty((count, top)),
        )
        to = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        self._engine.logprobs(*_rows(logits), rows, tokens, top, *[tensor.data_ptr() for tensor in to])
        return found


def _rows(logits: Tensor) -> tuple[int, int, int]:
    """Address and shape, as the kernels take them."""
    check_dims("logits", logits, 2)
    checked("logits", logits, logits.shape)
    return logits.data_ptr(), logits.shape[0], logits.shape[1]
