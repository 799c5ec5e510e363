"""The loading controller: as many tokens are computed again as can be while the next layer loads.

Off unless a recipe asks for it: answers then depend on how fast a disk happens to be.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def load_ratio(load_s: float, compute_s: float, floor: float) -> float:
    """The share of tokens that can be computed in one layer while the next one loads; `compute_s` is for all tokens."""
    if compute_s <= 0:
        return floor
    return min(1.0, max(floor, load_s / compute_s))


class LoadMeter:
    """How long a layer takes to load and to compute, for one request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opened_s = clock()
        self._compute_s = 0.0
        self._computed = 0.0  # tokens times layers
        self._began_s = 0.0

    def begin(self) -> None:
        """A row is about to run."""
        self._began_s = self._clock()

    def end(self, tokens: int, layers: int) -> None:
        """It has run."""
        self._compute_s += self._clock() - self._began_s
        self._computed += tokens * layers

    def ratio(self, layers_loaded: int, layers: int, tokens: int, floor: float) -> float:
        """The ratio for the rest: nothing is left to load once everything is here."""
        if layers_loaded >= layers or not self._computed:
            return floor
        load_s = (self._clock() - self._opened_s) / max(1, layers_loaded)
        return load_ratio(load_s, self._compute_s / self._computed * tokens, floor)
