"""What records the operations of a step and runs them again: programs of native calls, captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from .draw_table import LoopDraws
from .values import Paging


class Recorded(Protocol):
    """A step that can be run again: the same operations on the same tensors, whose contents may have changed."""

    @property
    def result(self) -> Tensor:
        """What the step returned; each run writes it anew, and so may runs of other recordings."""
        ...

    def run(self) -> bool:
        """Run again; False if it was stopped half way."""
        ...

    def loop(self, steps: int, ids: Tensor, ends: Sequence[Sequence[int]]) -> Tensor:
        """Run up to `steps` times a step that ended with `advance`; the tokens after each run, [runs, rows].

        There are `ends` for each row; rows behind them only pad the step, and their tokens are left out. Stops after a
        run in which a row drew one of its `ends` or, as -1, no token at all.
        """
        ...


class Recorder(Protocol):
    """Records steps. What it holds between runs is memory, never state."""

    @property
    def max_rows(self) -> int:
        """Rows of the largest step worth recording: larger ones spend their time in products, not in launches."""
        ...

    def padded_rows(self, rows: int) -> int:
        """Rows of the recording that serves a decode step of `rows`: few recordings serve all steps."""
        ...

    def room_tokens(self, rows: int, tokens: int, most: int) -> int:
        """Tokens of a row that the page tables of a recording have room for; those of the decode step have `tokens`.

        `most` is what a row may ever have. Kernels may be chosen by it, so recordings of several rooms may serve one
        number of rows.
        """
        ...

    def record(self, step: Callable[[], Tensor]) -> Recorded | None:
        """Run `step` and remember what it did; None if it did something that cannot be remembered."""
        ...

    @property
    def captures(self) -> bool:
        """Whether a recording is what a device did, which then reads all that changes from a step's buffers."""
        ...

    @property
    def draws(self) -> bool:
        """Whether the rows of a loop may draw; otherwise they take their likeliest tokens."""
        ...

    def advance(
        self, logits: Tensor, ids: Tensor, paging: Sequence[Paging], page_tokens: int, draws: LoopDraws | None = None
    ) -> None:
        """Inside a step: put the token that each row draws into `ids` and move each row one position on.

        Without `draws` that is its likeliest one.
        That is its position and its slots, and its length (`seq_lens`) where the backend's kernels read it.
        """
        ...

    def stop(self, stopped: bool) -> None:
        """Stop what runs now, from any thread, and refuse to run until told otherwise."""
        ...
