"""Breaks lines of a streamed answer between words. Knows the width of a terminal, not what is written on it.

A word is shown letter by letter as it comes. When it reaches the edge, it is erased and written again on the next line.
"""

from __future__ import annotations

import shutil
import unicodedata

FENCE = "```"


class WordWrap:
    """The place of the cursor in a line, and the word that it is in. Lines of code between fences stay as they are."""

    def __init__(self, columns: int | None = None) -> None:
        """`columns` of a fixed terminal; by default those of stdout, whenever a line begins."""
        self._fixed = columns
        self._in_code = False
        self.start_line()

    def start_line(self) -> None:
        """The cursor is in the first column of a new line."""
        # The last column stays empty: some terminals wrap when it is filled, others with the next letter.
        self._room = (self._fixed or shutil.get_terminal_size().columns) - 1
        self._column = 0
        self._word = ""
        self._word_cells = 0
        self._line_start = ""

    def feed(self, text: str) -> str:
        """The text with line breaks and movements of the cursor."""
        return "".join(map(self._placed, text))

    def _placed(self, char: str) -> str:
        if char == "\n":
            self._in_code ^= self._line_start == FENCE
            self.start_line()
            return char
        if len(self._line_start) < len(FENCE):
            self._line_start += char
        if self._in_code or self._room < 2:
            return char
        cells = 8 - self._column % 8 if char == "\t" else cell_width(char)
        broken = self._broken(char) if self._column + cells > self._room else ""
        if char.isspace() and broken:
            return broken  # a space at the edge is the line break
        self._column += cells
        if char.isspace() or cells > 1:  # a line may also break behind a wide character, as those of Chinese
            self._word, self._word_cells = "", 0
        else:
            self._word += char
            self._word_cells += cells
        return broken + char

    def _broken(self, char: str) -> str:
        """A line break before the current word, or at the cursor where that is no word or has filled the line."""
        word, cells = self._word, self._word_cells
        moves = cells < self._column and not char.isspace() and cell_width(char) < 2
        self._column, self._word, self._word_cells = (cells, word, cells) if moves else (0, "", 0)
        return f"\x1b[{cells}D\x1b[K\n{word}" if moves and cells else "\n"


def cell_width(char: str) -> int:
    """The columns that a character takes."""
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1
