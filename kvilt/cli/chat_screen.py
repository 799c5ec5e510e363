"""Output of an answer: its content on stdout, everything else on stderr; on a terminal its reasoning is dimmed.

Control characters are removed, so text from a model never moves the cursor or changes the terminal. This module does
not know conversations.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

_DRAFTED, _USUAL = "\x1b[32m", "\x1b[39m"
_DIM, _BRIGHT = "\x1b[2m", "\x1b[22m"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters."""
    return _CONTROL.sub("\ufffd", text.replace("\r", ""))


class Screen:
    """A terminal, or pipes in its place."""

    def __init__(self, show_drafts: bool = False) -> None:
        self._show_drafts = show_drafts
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._plain = not sys.stdout.isatty()  # a program gets the text unchanged
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._mid_line = False
        self._reasons = False  # the last piece was reasoning

    def piece(self, text: str, drafted: bool = False, reasoning: bool = False) -> None:
        """Write a piece of an answer at once; drafted text is green if drafts are shown.

        Reasoning is dimmed, with an empty line after it. A program that reads stdout gets it on stderr.
        """
        if self._reasons and not reasoning:
            self._end_reasoning()
        self._reasons = reasoning
        shown = text if self._plain else printable(text)
        if drafted and self._show_drafts and not self._plain:
            shown = f"{_DRAFTED}{shown}{_USUAL}"
        self._write(f"{_DIM}{shown}{_BRIGHT}" if reasoning and not self._plain else shown, reasoning)
        self._mid_line = not text.endswith("\n")

    def _write(self, text: str, reasoning: bool) -> None:
        out = sys.stderr if reasoning and self._plain else sys.stdout
        out.write(text)
        out.flush()

    def _end_reasoning(self) -> None:
        self._reasons = False
        self._write("\n\n" if self._mid_line else "\n", reasoning=True)
        self._mid_line = False

    def end_line(self) -> None:
        """Start a new line, unless the cursor is at the start of one."""
        if self._reasons:
            self._end_reasoning()
        elif self._mid_line:
            self.piece("\n")

    def note(self, text: str) -> None:
        """Write dimmed lines."""
        self._below(text, "dim")

    def aside(self, text: str) -> None:
        """Write a dimmed line, on a terminal only."""
        self.end_line()
        if self._console.is_terminal:
            self.note(text)

    def complain(self, text: str) -> None:
        """Write an error."""
        self._below(text, "yellow")

    def _below(self, text: str, style: str) -> None:
        self.end_line()
        air = "\n" if self.interactive else ""
        self._console.print(printable(text) + air, style=style)

    @contextmanager
    def interruptible(self, stop: Callable[[], None]) -> Iterator[None]:
        """Within the block, Ctrl+C calls `stop` instead of raising KeyboardInterrupt. On a terminal only."""
        if not self.interactive:
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
