"""Writes an answer as it comes: content to stdout, reasoning dimmed before it, or to stderr if stdout is no terminal.

Control characters are removed on a terminal, so text from a model never moves the cursor or changes the terminal. Lines
end between words there.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .word_wrap import WordWrap

_DRAFTED, _USUAL = "\x1b[32m", "\x1b[39m"
_DIM, _BRIGHT = "\x1b[2m", "\x1b[22m"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters."""
    return _CONTROL.sub("\ufffd", text.replace("\r", ""))


class AnswerWriter:
    """A terminal, or pipes in its place."""

    def __init__(self, show_drafts: bool = False) -> None:
        self._show_drafts = show_drafts
        self._plain = not sys.stdout.isatty()  # a program gets the text unchanged
        self._mid_line = False
        self._reasons = False  # the last piece was reasoning
        self._wrap = None if self._plain else _word_wrap()

    def piece(self, text: str, drafted: bool = False, reasoning: bool = False) -> None:
        """Write a piece at once; drafted text is green if drafts are shown. An empty line follows reasoning."""
        if self._reasons and not reasoning:
            self._end_reasoning()
        self._reasons = reasoning
        shown = text if self._plain else self._wrapped(printable(text))
        if drafted and self._show_drafts and not self._plain:
            shown = f"{_DRAFTED}{shown}{_USUAL}"
        self._write(f"{_DIM}{shown}{_BRIGHT}" if reasoning and not self._plain else shown, reasoning)
        self._mid_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Start a new line, unless the cursor is at the start of one."""
        if self._reasons:
            self._end_reasoning()
        elif self._mid_line:
            self.piece("\n")

    def _end_reasoning(self) -> None:
        self._reasons = False
        self._write("\n\n" if self._mid_line else "\n", reasoning=True)
        self._mid_line = False
        if self._wrap is not None:
            self._wrap.start_line()

    def _wrapped(self, text: str) -> str:
        return text if self._wrap is None else self._wrap.feed(text)

    def _write(self, text: str, reasoning: bool) -> None:
        out = sys.stderr if reasoning and self._plain else sys.stdout
        out.write(text)
        out.flush()


def _word_wrap() -> WordWrap:
    from .word_wrap import WordWrap  # pipes need none

    return WordWrap()
