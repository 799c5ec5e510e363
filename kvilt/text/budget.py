"""What one rendering of a chat template may use: steps, work, characters and seconds, counted on an object of its own.

Work is counted in units of about a nanosecond, before it is done: one call into C can neither be watched nor ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from ..errors import TemplateError

MAX_INT_BITS = 4096  # of any number


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Bounds on a template; real ones stay far below all of them."""

    source_chars: int = 1 << 16
    depth: int = 120  # of the template's syntax tree, and of values
    text_chars: int = 1 << 22  # of the input, the output and any one value
    made_chars: int = 1 << 26  # of all text made on the way
    items: int = 100_000  # of any one list, and of all values inside each other
    steps: int = 2_000_000
    call_work: int = 1 << 24  # of one filter, method or operator
    work: int = 1 << 30  # of all of them
    seconds: float = 2.0


class TemplateBudget:
    """The resources that one rendering has used; raises TemplateError when a limit is exceeded."""

    __slots__ = ("_deadline", "_made", "_steps", "_work", "limits")

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._steps = limits.steps
        self._made = limits.made_chars
        self._work = limits.work
        self._deadline = monotonic() + limits.seconds

    def tick(self, steps: int = 1) -> None:
        """Account for work done or about to be done."""
        self._steps -= steps
        if self._steps < 0:
            raise TemplateError(f"the chat template took more than {self.limits.steps} steps and was stopped")
        if monotonic() > self._deadline:
            raise TemplateError(f"the chat template ran for more than {self.limits.seconds} s and was stopped")

    @property
    def worked(self) -> int:
        """Units of work so far."""
        return self.limits.work - self._work

    def work(self, units: int, call: int | None = None) -> None:
        """Account for work before it is done; `call` is the part of the longest single call, all of it if not given."""
        self.tick()
        self._work -= units
        if (units if call is None else call) > self.limits.call_work or self._work < 0:
            raise TemplateError("the chat template works on texts or lists that are too long for what it does to them")

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
