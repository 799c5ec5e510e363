"""What one rendering of a chat template may use: steps, characters and seconds, counted on an object of its own."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from ..errors import TemplateError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a template; real ones stay far below all of them."""

    source_chars: int = 1 << 16
    depth: int = 120  # of the template's syntax tree, and of values
    text_chars: int = 1 << 23  # of the input, the output and any one value
    made_chars: int = 1 << 26  # of all text made on the way
    items: int = 100_000  # of any one list, and of all values inside each other
    steps: int = 2_000_000
    seconds: float = 2.0


class Budget:
    """The running account of one rendering; raises TemplateError when it is overdrawn."""

    __slots__ = ("_deadline", "_made", "_steps", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._steps = limits.steps
        self._made = limits.made_chars
        self._deadline = monotonic() + limits.seconds

    def tick(self, steps: int = 1) -> None:
        """Account for work done or about to be done."""
        self._steps -= steps
        if self._steps < 0:
            raise TemplateError(f"the chat template took more than {self.limits.steps} steps and was stopped")
        if monotonic() > self._deadline:
            raise TemplateError(f"the chat template ran for more than {self.limits.seconds} s and was stopped")

    def make(self, chars: int) -> None:
        """Account for a text of so many characters before it is made."""
        self.tick()
        self._made -= chars
        if chars > self.limits.text_chars or self._made < 0:
            raise TemplateError(
                f"the chat template makes more text than it may ({self.limits.text_chars} characters at once, "
                f"{self.limits.made_chars} in all) and was stopped"
            )

    def hold(self, items: int) -> None:
        """Account for a list of so many items before it is made."""
        if items > self.limits.items:
            raise TemplateError(f"the chat template makes a list of {items} items; {self.limits.items} is the most")
        self.tick(1 + items // 8)
