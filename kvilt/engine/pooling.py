"""The embedding of a prompt: its states after the last norm, pooled while the prompt is computed in rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..batch import Logits, Pooled, Row
from ..errors import NumericsError
from .event import PooledPrompt

PoolingKind = Literal["mean", "last"]


@dataclass(slots=True, eq=False)
class Pooling:
    """How far the states of one prompt are pooled. Rows that are computed again, after a preemption, count once."""

    kind: PoolingKind
    prompt: int  # tokens
    at: int = 0  # the first position that was not pooled
    total: Tensor | None = None  # [hidden] float64, on the host

    def want(self, start: int, stop: int) -> Pooled | None:
        """What a row at positions [start, stop) must want; None where it adds nothing."""
        if self.kind == "last":
            return Pooled(last=True) if stop >= self.prompt > self.at else None
        return Pooled(first=max(0, self.at - start)) if stop > self.at else None

    def watcher(self, stop: int) -> Callable[[Row, Logits, int], None]:
        """The callback of such a row, which ends before `stop`."""
        return partial(self._add, stop)

    def _add(self, stop: int, row: Row, logits: Logits, index: int) -> None:
        if not isinstance(row.want, Pooled):
            return
        added = logits.hidden[index].cpu()
        if not bool(torch.isfinite(added).all()):
            raise NumericsError([0])
        self.total = added if self.total is None else self.total + added
        self.at = stop

    def event(self) -> PooledPrompt | None:
        """The embedding, once the whole prompt is pooled."""
        if self.total is None or self.at < self.prompt:
            return None
        count = self.prompt if self.kind == "mean" else 1
        return PooledPrompt(0, tuple((self.total / count).tolist()))
