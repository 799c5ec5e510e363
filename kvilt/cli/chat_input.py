"""Input of a chat, from a terminal or a pipe. Three quotes start and end a text of several lines.

This module does not know what the input means.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

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


class TerminalInput:
    """A terminal with line editing, a history file, and Tab completion of commands."""

    def __init__(self, history: Path, commands: Sequence[str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            [("bold", "> ")],
            multiline=True,  # the binding of Enter decides, see below
            prompt_continuation=[("", "  ")],
            key_bindings=_keys(),
            history=_history(history),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
        )

    def read(self) -> str:
        text: str = self._session.prompt()
        return text


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


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    return keys


def _history(path: Path) -> History:
    """A history file that only its owner can read; kept in memory where no file can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
