"""Input of a chat, from a terminal or a pipe. Three quotes start and end a text of several lines.

This module does not know what the input means.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

QUOTES = '"""'


class InputReader(Protocol):
    """A source of input."""

    def read(self) -> str:
        """The next input; EOFError at the end, KeyboardInterrupt for Ctrl+C."""
        ...


def is_open(text: str) -> bool:
    """Whether a text started with three quotes and the closing quotes are missing."""
    text = text.strip()
    return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))


def unquoted(text: str) -> str | None:
    """The text between three quotes; None without quotes."""
    text = text.strip()
    if not text.startswith(QUOTES):
        return None
    return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


class PipeInput:
    """Lines of a pipe or a file; invalid UTF-8 becomes U+FFFD."""

    def __init__(self, lines: Iterable[bytes] | None = None) -> None:
        self._lines: Iterator[bytes] = iter(sys.stdin.buffer if lines is None else lines)

    def read(self) -> str:
        text = self._line()
        while is_open(text):
            try:
                text += "\n" + self._line()
            except EOFError:  # the end closes what is open
                break
        return text

    def _line(self) -> str:
        line = next(self._lines, None)
        if line is None:
            raise EOFError
        return line.decode("utf-8", "replace").rstrip("\r\n")


def open_input(interactive: bool, history: Path, commands: Sequence[str]) -> InputReader:
    """The terminal of a user, with a history file and the commands to complete; otherwise the lines of a pipe."""
    if not interactive:
        return PipeInput()
    from .chat_terminal import TerminalInput  # prompt_toolkit, which a pipe does not need

    return TerminalInput(history, commands)
