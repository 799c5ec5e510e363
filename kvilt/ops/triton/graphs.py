"""Steps captured as CUDA graphs: one launch from Python for all kernels of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contract import Paging
from ..draw_table import LoopDraws
from .advance import advance
from .sampling import TritonSampling


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph, what it returns, and the tokens it draws if it draws some."""

    graph: torch.cuda.CUDAGraph
    result: Tensor
    drawn: Tensor | None  # [rows] int64, -1 where a row has no largest logit
    stopped: Callable[[], bool]

    def run(self) -> bool:
        if self.stopped():
            return False
        self.graph.replay()
        return True

    def loop(self, steps: int, ids: Tensor, ends: Sequence[Sequence[int]]) -> Tensor:
        assert self.drawn is not None
        rows = len(ends)
        log = torch.empty((steps, rows), dtype=torch.int64, device=ids.device)
        done = 0
        while done < steps and self.run():
            log[done] = self.drawn[:rows]
            done += 1
        tokens = log[:done].cpu()
        return tokens[: _first_end(tokens, ends)]


def _first_end(tokens: Tensor, ends: Sequence[Sequence[int]]) -> int:
    """Steps up to the first in which a row draws one of its ends, or nothing; steps after it were in vain."""
    for step, row in enumerate(tokens.tolist()):
        if any(token < 0 or token in end for token, end in zip(row, ends, strict=True)):
            return step + 1
    return len(tokens)


# A step of up to so many rows is padded to a multiple of so many: a capture takes time and memory, a row next to none.
_UNITS = ((64, 8), (128, 16), (1 << 30, 32))


class GraphRecorder:
    """Captures steps. All graphs share their memory, since only one of them runs at a time."""

    max_rows = 512
    draws = True
    captures = True

    def __init__(self, sampling: TritonSampling) -> None:
        self._sampling = sampling
        self._pool: Any = None
        self._stopped = False
        self._drawn: Tensor | None = None

    def padded_rows(self, rows: int) -> int:
        """The next of the sizes that graphs are captured for."""
        if rows <= 8:
            return 1 << (rows - 1).bit_length()
        unit = next(unit for most, unit in _UNITS if rows <= most)
        return -(-rows // unit) * unit

    def record(self, step: Callable[[], Tensor]) -> CapturedStep | None:
        """Run `step` once as it is, which compiles its kernels, then capture it without running it."""
        self._drawn = None
        made = step().clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # Only this thread is held to the rules of a capture: others may wait for copies, as the writer of a store does.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()
        result.copy_(made)
        return CapturedStep(graph, result, self._drawn, lambda: self._stopped)

    def advance(
        self, logits: Tensor, ids: Tensor, paging: Sequence[Paging], page_tokens: int, draws: LoopDraws | None = None
    ) -> None:
        sampled = self._sampling.launch(logits, None if draws is None else draws.table)
        self._drawn = advance(sampled, ids, paging, page_tokens, draws)

    def stop(self, stopped: bool) -> None:
        self._stopped = stopped
