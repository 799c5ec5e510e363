"""Output of a chat: answers on stdout, everything else on stderr.

Control characters are removed, so text from a model never moves the cursor or changes the terminal. This module does
not know conversations.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from .answer_writer import AnswerWriter, printable


class Screen:
    """A terminal, or pipes in its place."""

    def __init__(self, show_drafts: bool = False) -> None:
        self._writer = AnswerWriter(show_drafts)
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def piece(self, text: str, drafted: bool = False, reasoning: bool = False) -> None:
        """Write a piece of an answer at once."""
        self._writer.piece(text, drafted, reasoning)

    def end_line(self) -> None:
        """Start a new line, unless the cursor is at the start of one."""
        self._writer.end_line()

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
