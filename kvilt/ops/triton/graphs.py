"""Steps captured as CUDA graphs: one launch from Python for all kernels of a step."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contract import Paging
from ..draw_table import LoopDraws
from .advance import advance
from .decode_attention import MOST_KEYS, MOST_ROWS
from .sampling import TritonSampling

READ_STEPS = 8  # of a loop, whose tokens are read together


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
        log = _TokenLog(steps, len(ends), ids.device)
        while log.launched < steps and self.run():
            assert self.drawn is not None
            if log.add(self.drawn[: len(ends)]) and any(_has_end(one, ends) for one in log.read().tolist()):
                break
        tokens = log.read_all()
        return tokens[: _first_end(tokens, ends)]


class _TokenLog:
    """Tokens of steps that are launched one after the other. Those of some steps are read while the next ones run.

    So the device always has steps to do, and few of them are in vain when a row ends.
    """

    def __init__(self, steps: int, rows: int, device: torch.device) -> None:
        self.launched = 0
        self._read = 0
        self._arriving: deque[tuple[int, torch.cuda.Event | None]] = deque()
        self._log = torch.empty((steps, rows), dtype=torch.int64, device=device)
        self._on_device = device.type == "cuda"
        self._host = torch.empty((steps, rows), dtype=torch.int64, pin_memory=self._on_device)

    def add(self, tokens: Tensor) -> bool:
        """The tokens [rows] of another step; True if those of earlier steps should be read now."""
        self._log[self.launched] = tokens
        self.launched += 1
        if self.launched % READ_STEPS == 0:
            self._copy()
        return self.launched % READ_STEPS == 0 and len(self._arriving) > 1

    def read(self) -> Tensor:
        """The tokens of the earliest steps that were not read yet [steps, rows]."""
        stop, copied = self._arriving.popleft()
        if copied is not None:
            copied.synchronize()
        start, self._read = self._read, stop
        return self._host[start:stop]

    def read_all(self) -> Tensor:
        """The tokens of all steps."""
        self._copy()
        while self._arriving:
            self.read()
        return self._host[: self.launched]

    def _copy(self) -> None:
        """Let the tokens that are not on their way yet be copied to the host."""
        start, copied = self._arriving[-1][0] if self._arriving else self._read, None
        self._host[start : self.launched].copy_(self._log[start : self.launched], non_blocking=True)
        if self._on_device:
            copied = torch.cuda.Event()
            copied.record()
        self._arriving.append((self.launched, copied))


def _has_end(tokens: Sequence[int], ends: Sequence[Sequence[int]]) -> bool:
    """Whether a row draws one of its ends in a step, or nothing."""
    return any(token < 0 or token in end for token, end in zip(tokens, ends, strict=True))


def _first_end(tokens: Tensor, ends: Sequence[Sequence[int]]) -> int:
    """Steps up to the first in which a row draws one of its ends, or nothing; steps after it were in vain."""
    for step, row in enumerate(tokens.tolist()):
        if _has_end(row, ends):
            return step + 1
    return len(tokens)


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is launched inside.

    Only this thread is held to the rules of a capture: others may wait for copies, as the writer of a store does. A
    garbage collection in this thread could free another model's graphs, which those rules forbid.
    """
    stream, collects = torch.cuda.current_stream(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        torch.cuda.set_stream(stream)  # torch stays on the stream of a capture that failed
        if collects:
            gc.enable()


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

    def room_tokens(self, rows: int, tokens: int, most: int) -> int:
        """Few rows of few tokens have recordings of their own, with the attention that is fastest for them."""
        return min(most, MOST_KEYS) if rows <= MOST_ROWS and tokens <= MOST_KEYS else most

    def record(self, step: Callable[[], Tensor]) -> CapturedStep | None:
        """Run `step` once as it is, which compiles its kernels, then capture it without running it."""
        self._drawn = None
        made = step().clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None  # a failed capture leaves its pool open
        with _capture(graph, pool):
            result = step()
        self._pool = pool
        result.copy_(made)
        return CapturedStep(graph, result, self._drawn, lambda: self._stopped)

    def advance(
        self, logits: Tensor, ids: Tensor, paging: Sequence[Paging], page_tokens: int, draws: LoopDraws | None = None
    ) -> None:
        sampled = self._sampling.launch(logits, None if draws is None else draws.table)
        self._drawn = advance(sampled, ids, paging, page_tokens, draws)

    def stop(self, stopped: bool) -> None:
        self._stopped = stopped
