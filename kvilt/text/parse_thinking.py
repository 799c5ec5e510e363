"""Splits an answer into the reasoning at its beginning and what follows. Refuses to know calls."""

from __future__ import annotations

from .parse_formats import Thinking
from .parse_marks import HeldBlanks, partial_marker


class ThinkingReader:
    """Reasoning stands at the beginning, between markers; blanks beside the markers belong to them."""

    def __init__(self, markers: Thinking | None, opened: bool) -> None:
        """With `opened` the opening marker stands in the prompt."""
        self.work = 0
        self._markers = markers
        self._step = self._after if markers is None else self._inside if opened else self._before
        self._blanks = HeldBlanks()
        self._marker = ""  # how much of a marker stands at the end of the text
        self._spoke = False  # reasoning has begun with something other than a blank
        self._strip = False  # blanks that come now belong to the closing marker
        self._reasoning: list[str] = []
        self._answer: list[str] = []

    @property
    def passed(self) -> bool:
        """Whether all text from here on belongs to the answer."""
        return self._step == self._after and not self._strip

    def feed(self, text: str) -> tuple[str, str]:
        """More reasoning, and more of the answer after it."""
        for i, char in enumerate(text):
            if self.passed:
                self._answer.append(text[i:])
                break
            self.work += 1
            self._step(char)
        return self._taken()

    def finish(self) -> tuple[str, str]:
        """What still waits: inside reasoning it is reasoning, before it the answer."""
        if self._step == self._before:
            self._answer.append(self._blanks.take() + self._marker)
        elif self._step == self._inside:
            self._think(self._marker)
        self._marker = ""
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        taken = "".join(self._reasoning), "".join(self._answer)
        self._reasoning.clear()
        self._answer.clear()
        return taken

    def _before(self, char: str) -> None:
        """Blanks and the opening marker; anything else shows that there is no reasoning."""
        assert self._markers is not None
        if not self._marker and char.isspace():
            self._blanks.hold(char)
            return
        self._marker += char
        if self._marker == self._markers.open:
            self._blanks.take()
            self._marker, self._step = "", self._inside
        elif not self._markers.open.startswith(self._marker):
            self._answer.append(self._blanks.take() + self._marker)
            self._marker, self._step = "", self._after

    def _inside(self, char: str) -> None:
        assert self._markers is not None
        text = self._marker + char
        self._marker = partial_marker(text, (self._markers.close,))
        self._think(text[: len(text) - len(self._marker)])
        if self._marker == self._markers.close:
            self._blanks.take()
            self._marker, self._step, self._strip = "", self._after, True

    def _think(self, text: str) -> None:
        """Show reasoning but for blanks at its beginning, and hold those at its end."""
        shown = self._blanks.before(text)
        shown = shown if self._spoke else shown.lstrip()
        self._spoke = self._spoke or bool(shown)
        self._reasoning.append(shown)

    def _after(self, char: str) -> None:
        if not char.isspace():
            self._strip = False
            self._answer.append(char)
