"""Detects a sample that repeats itself: one pattern of tokens, again and again, up to the latest token.

Counts token ids only. Refuses to know text, and what happens to a sample that is caught.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..errors import ParamError

MAX_PATTERN_SIZE = 1024
MAX_WINDOW = 8192


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """When repetition ends a sample: how large a pattern may be, and how often it must come without a gap.

    A pattern counts if its repetitions fill `min_tokens`, and either there are `min_count` of them or they fill
    `enough_tokens`. The defaults let a sentence stand 20 times, a table of equal rows, and a line of dashes.
    """

    max_pattern_size: int = 128  # tokens
    min_pattern_size: int = 1
    min_count: int = 24  # a repetition that is not complete counts by its tokens
    min_tokens: int = 64
    enough_tokens: int = 512

    def __post_init__(self) -> None:
        self._check("max_pattern_size", 1, MAX_PATTERN_SIZE)
        self._check("min_pattern_size", 1, self.max_pattern_size)
        self._check("min_count", 2, MAX_WINDOW)
        self._check("min_tokens", 2, MAX_WINDOW)
        # Below two repetitions every text would count.
        self._check("enough_tokens", 2 * self.max_pattern_size, MAX_WINDOW)

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ParamError("repetition_detection", f"{name} must be a whole number from {low} to {high}")

    def needed(self, size: int) -> int:
        """Tokens that repetitions of a pattern of this size must fill."""
        return max(self.min_tokens, min(self.min_count * size, self.enough_tokens))

    @property
    def window(self) -> int:
        """The latest tokens that a decision depends on."""
        return self.needed(self.max_pattern_size)


class RepetitionDetector:
    """Watches the tokens of one sample.

    A look at the window costs its length. It also tells how many tokens must come before any pattern can be complete,
    and none of these is looked at: in ordinary text one token in about `min_tokens` is.
    """

    __slots__ = ("_detection", "_tail", "_wait", "looks")

    def __init__(self, detection: RepetitionDetection) -> None:
        self._detection = detection
        self._tail: deque[int] = deque(maxlen=detection.window)
        self._wait = 0  # tokens that need no look
        self.looks = 0  # at the window so far

    def add(self, token: int) -> bool:
        """Take a token in; True if the tokens up to this one end in a repeated pattern."""
        self._tail.append(token)
        if self._wait > 0:
            self._wait -= 1
            return False
        missing = self._missing()
        self._wait = max(0, missing - 1)
        return missing <= 0

    def _missing(self) -> int:
        """How many more tokens, at least, it takes until a pattern counts; 0: one does now."""
        self.looks += 1
        detection, latest_first = self._detection, [*reversed(self._tail)]
        count, sizes = len(latest_first), range(detection.min_pattern_size, detection.max_pattern_size + 1)
        repeated = _common_prefixes(latest_first, min(sizes[-1], count - 1))
        # The last `size` tokens are one repetition; each token before them that equals the one `size` later adds to it.
        filled = [size + repeated[size] if size < count else count for size in sizes]
        return min(detection.needed(size) - tokens for size, tokens in zip(sizes, filled, strict=True))


def _common_prefixes(items: list[int], most: int) -> list[int]:
    """How far `items` agrees with itself shifted by 0, 1, ..., `most` places: the Z function, in linear time."""
    count = len(items)
    lengths = [count] + [0] * most
    left = right = 0  # the agreement that reaches furthest
    for shift in range(1, most + 1):
        length = min(right - shift, lengths[shift - left]) if shift < right else 0
        while shift + length < count and items[length] == items[shift + length]:
            length += 1
        lengths[shift] = length
        if shift + length > right:
            left, right = shift, shift + length
    return lengths
