"""Input of a chat from a terminal. This module does not know what the input means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from .chat_input import is_open


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
