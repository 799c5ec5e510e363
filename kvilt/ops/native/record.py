"""Recorded steps of the native backend: a flat list of native calls that one call from Python runs again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..contract import Paging
from ..draw_table import LoopDraws
from .border import I64, check_dims, checked, f32, i64
from .memory import Buffers, BufferView

if TYPE_CHECKING:
    from _kvilt_native import KernelRunner, Program

_log = logging.getLogger(__name__)

# Operations of torch that only look at memory differently, and so need not be repeated.
_VIEWS = frozenset(
    {
        "aten::view",
        "aten::view.dtype",
        "aten::_unsafe_view",
        "aten::reshape",
        "aten::alias",
        "aten::detach",
        "aten::slice.Tensor",
    }
)


class _TorchWorked(Exception):
    """A step did arithmetic outside the native operations."""


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, buffers: Buffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler, for a second, when the first step is recorded. Nothing here is compiled.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A new tensor is fine if it looks at a buffer that stays; any other would be gone before the replay.
        stays = func.name() == "aten::lift_fresh" and self._buffers.holds(args[0])
        if not stays and func.name() not in _VIEWS:
            raise _TorchWorked(func.name())
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class NativeRecorded:
    """A program, and the memory its calls point to."""

    program: Program
    place: BufferView  # of the result; a tensor would keep its buffer from other recordings, which are many
    buffers: Buffers

    @property
    def result(self) -> Tensor:
        return self.buffers.at(self.place)

    def run(self) -> bool:
        return bool(self.program.run())

    def loop(self, steps: int, ids: Tensor, ends: Sequence[Sequence[int]]) -> Tensor:
        checked("ids", ids, (len(ids),), I64)
        out = torch.empty((steps, len(ids)), dtype=torch.int64)
        done = self.program.loop(steps, ids, [list(end) for end in ends], out)
        return out[:done]


class NativeRecorder:
    """Records for one runner. All recordings share their buffers, since only one of them runs at a time."""

    max_rows = 64
    draws = False
    captures = False

    def __init__(self, runner: KernelRunner, using: Callable[[Buffers], AbstractContextManager[None]]) -> None:
        self._runner = runner
        self._using = using
        self._buffers = Buffers(spare_bytes=1 << 62)  # never forgotten: programs know them by address

    def padded_rows(self, rows: int) -> int:
        """No padding: a row takes as long as it computes, and a recording next to no memory."""
        return rows

    def room_tokens(self, _rows: int, _tokens: int, most: int) -> int:
        """Always for all: no kernel is chosen by it."""
        return most

    def record(self, step: Callable[[], Tensor]) -> NativeRecorded | None:
        self._runner.begin_recording()
        try:
            with self._using(self._buffers), _OnlyViews(self._buffers):
                result = step()
        except _TorchWorked as worked:
            _log.info("steps of this model are not recorded: %s is done by torch", worked)
            return None
        finally:
            program = self._runner.end_recording()
        return NativeRecorded(program, self._buffers.place(result), self._buffers)

    def advance(
        self, logits: Tensor, ids: Tensor, paging: Sequence[Paging], page_tokens: int, draws: LoopDraws | None = None
    ) -> None:
        assert draws is None
        check_dims("logits", logits, 2)
        rows = len(logits)
        checked("logits", logits, logits.shape)
        checked("ids", ids, (rows,), I64)
        for one in paging:
            check_dims("tables", one.tables, 2)
            checked("positions", one.positions, (rows,), I64)
            checked("slots", one.slots, (rows,), I64)
            checked("tables", one.tables, (rows, paging[0].tables.shape[1]), I64)
        self._runner.argmax(f32(logits), rows, logits.shape[1], i64(ids))
        slots, tables = [i64(one.slots) for one in paging], [i64(one.tables) for one in paging]
        width, positions = paging[0].tables.shape[1], paging[0].positions
        self._runner.advance(i64(positions), len(positions), slots, tables, width, page_tokens)

    def stop(self, stopped: bool) -> None:
        self._runner.stop(stopped)
