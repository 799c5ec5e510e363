"""Markers in streamed text: what may become one, and blanks that wait to see whether one follows."""

from __future__ import annotations

from collections.abc import Iterable


def partial_marker(text: str, marks: Iterable[str]) -> str:
    """The longest end of a text that begins, or is, one of the marks. Texts are no longer than a mark."""
    for start in range(len(text)):
        end = text[start:]
        if any(mark.startswith(end) for mark in marks):
            return end
    return ""


class HeldBlanks:
    """Whitespace at the end of the output, held back until something follows it."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def hold(self, text: str) -> None:
        self._held.append(text)

    def take(self) -> str:
        """All that is held, and then nothing is."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def before(self, text: str) -> str:
        """What may be shown when a text follows: held blanks and the text, less the blanks at its own end."""
        body = text.rstrip()
        shown = self.take() + body if body else ""
        self.hold(text[len(body) :])
        return shown
